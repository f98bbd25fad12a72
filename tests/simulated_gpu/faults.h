// Says of a fault which allocation of device memory it is next to, and in which kernel.
#pragma once

namespace simulated_gpu {

// From now on. What handled faults before still does, afterwards.
void report_faults();

}  // namespace simulated_gpu
