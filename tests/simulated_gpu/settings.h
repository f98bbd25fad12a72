// What the environment says of the simulated GPUs.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace simulated_gpu {

inline uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Settings {
  int num_devices = static_cast<int>(setting("SIMULATED_GPUS", 1));
  int num_multiprocessors = static_cast<int>(setting("SIMULATED_GPU_MULTIPROCESSORS", 132));
  // As some GPUs that processes share do not have it.
  bool has_cooperative_launch = setting("SIMULATED_GPU_COOPERATIVE_LAUNCH", 1) != 0;
  uint64_t memory_mib = setting("SIMULATED_GPU_MEMORY_MIB", 4096);  // of each
  // Threads that a block really has: a multiple of 32, however many the launch asks for.
  int threads_per_block = static_cast<int>(setting("SIMULATED_GPU_THREADS", 32));
  // That streams share (CUDA's own variable); 0: each stream has one of its own.
  uint64_t num_hardware_queues = setting("CUDA_DEVICE_MAX_CONNECTIONS", 0);
  // How long a nap in a stream or block may be (0: none), and what makes naps come as they do.
  uint64_t max_nap_us = setting("SIMULATED_GPU_NAP_US", 300);
  uint64_t seed = setting("SIMULATED_GPU_SEED", 0);
  // Whether a process can open the memory of another, which some containers forbid.
  bool has_ipc = setting("SIMULATED_GPU_IPC", 1) != 0;
  // Which CUDA the driver takes: 13020 is 13.2. One below the build's is refused.
  int driver_version = static_cast<int>(setting("SIMULATED_GPU_DRIVER_VERSION", 13020));
  // Whether torch's own operators work, by the CPU's kernels.
  bool has_torch_operators = setting("SIMULATED_GPU_TORCH_OPERATORS", 0) != 0;
  // Whether torch's symmetric memory works.
  bool has_symmetric_memory = setting("SIMULATED_GPU_SYMMETRIC_MEMORY", 0) != 0;
};

inline const Settings& settings() {
  static const Settings read;
  return read;
}

}  // namespace simulated_gpu
