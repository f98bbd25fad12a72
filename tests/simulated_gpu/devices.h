// Which GPUs there are, and which one this thread uses.
#pragma once

namespace simulated_gpu {

// As the program counts them: CUDA_VISIBLE_DEVICES may hide some.
int num_devices();
int current_device();
// The number of a device whatever CUDA_VISIBLE_DEVICES says, and back; -1 where it is hidden.
int physical_device(int device);
int visible_device(int physical);
// Fails as CUDA does where there is no such device.
void check_device(int device);

}  // namespace simulated_gpu
