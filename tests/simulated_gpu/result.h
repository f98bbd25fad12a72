// How calls of the CUDA runtime end: what a body throws becomes the error that is returned, and the
// thread's last one. Knows no other part of the simulation.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace simulated_gpu {

struct Failure {
  cudaError_t error;
  std::string why;  // empty where the error's own text says it all
};

[[noreturn]] inline void fail(cudaError_t error, std::string why = {}) {
  throw Failure{error, std::move(why)};
}
// As a GPU would take it and the simulation does not: says so on stderr, too.
[[noreturn]] void fail_unsupported(const std::string& what);

inline void require(bool holds, cudaError_t otherwise, const char* why = "") {
  if (!holds) fail(otherwise, why);
}

// Remembers it as the last error of this thread.
cudaError_t note(const Failure& failure) noexcept;

// In a child of fork() the simulation is dead, as CUDA is.
void refuse_in_forked_child();

// What every function of the CUDA runtime that is simulated does.
template <typename Body>
cudaError_t call(const Body& body) noexcept {
  try {
    refuse_in_forked_child();
    body();
    return cudaSuccess;
  } catch (const Failure& failure) {
    return note(failure);
  }
}

}  // namespace simulated_gpu
