#include "result.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>

namespace simulated_gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_reason;

// The function of this name in the library that is simulated; null before torch has loaded it.
template <typename Function>
Function* real(const char* name) {
  const std::string file = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
  void* library = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

void fail_unsupported(const std::string& what) {
  std::fprintf(stderr, "simulated GPU: %s\n", what.c_str());
  fail(cudaErrorNotSupported, what);
}

cudaError_t note(const Failure& failure) noexcept {
  last_error = failure.error;
  last_reason = failure.why;
  return failure.error;
}

void refuse_in_forked_child() {
  // The first process that calls CUDA; those that it starts anew have one of their own.
  static const pid_t owner = getpid();
  if (getpid() != owner) fail(cudaErrorInitializationError, "CUDA was used before this fork()");
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

extern "C" cudaError_t cudaPeekAtLastError() { return last_error; }

// The real text, and after it what this thread's last call has to add.
extern "C" const char* cudaGetErrorString(cudaError_t error) {
  thread_local std::string text;
  auto* real_text = real<const char*(cudaError_t)>("cudaGetErrorString");
  text = real_text == nullptr ? "error " + std::to_string(error) : real_text(error);
  if (error != cudaSuccess && !last_reason.empty()) text += " (simulated GPU: " + last_reason + ")";
  return text.c_str();
}
