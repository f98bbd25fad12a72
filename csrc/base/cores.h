// Which cores there are to run on.
#pragma once

namespace rota {

// Cores that this thread may run on: taskset and containers allow fewer than the machine has.
int num_usable_cores();

}  // namespace rota
