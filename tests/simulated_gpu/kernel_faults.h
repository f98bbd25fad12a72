// Kernels that go wrong on purpose, so that tests see what becomes of it. The environment names
// them by a part of their name, as people write it:
//
//   SIMULATED_GPU_FLIP_BIT  ends as it should, and then flips the lowest bit of its first result
//   SIMULATED_GPU_HANG      never ends
//   SIMULATED_GPU_DESERT    the blocks of its first local rank return at once: the others wait
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "cuda/bucket_args.h"
#include "cuda/collective_args.h"
#include "cuda/peers.h"

namespace simulated_gpu {

inline bool is_named_by(const char* variable, std::string_view kernel) {
  const char* part = std::getenv(variable);
  return part != nullptr && *part != '\0' && kernel.find(part) != kernel.npos;
}

[[noreturn]] inline void hang() {
  while (true) pause();
}

// Where a kernel with these arguments puts its first result; null where it has none.
template <typename... Rest>
std::byte* first_result(const rota::cuda::Peers&, const rota::cuda::CollectiveArgs& args,
                        const Rest&...) {
  return args.output[0];
}
inline std::byte* first_result(const rota::cuda::PackArgs& args) { return args.bucket.wire; }
inline std::byte* first_result(const rota::cuda::UnpackArgs& args) {
  return args.bucket.num_tiles == 0 ? nullptr : args.bucket.tile(0, 1).data;
}

}  // namespace simulated_gpu
