// Copies and fills, queued on streams.
#include <cstring>

#include "capture.h"
#include "devices.h"
#include "memory.h"
#include "result.h"

namespace simulated_gpu {
namespace {

// Memory that CUDA knows nothing of.
bool is_pageable(const void* address) { return !memory().find(address).has_value(); }

// The end of a range that starts in an allocation lies in it, too.
void check_range(const void* address, size_t num_bytes) {
  const auto allocation = memory().find(address);
  if (!allocation || allocation->kind == MemoryKind::kRegistered) return;
  const auto offset =
      static_cast<size_t>(static_cast<const std::byte*>(address) - allocation->base);
  require(num_bytes <= allocation->num_bytes - offset, cudaErrorInvalidValue,
          "the range ends outside of its allocation");
}

// From pageable memory the bytes have been read, to it they have been written, when this returns:
// as on a GPU, where only the former is true of any size.
CompletionPtr copy(void* dst, const void* src, size_t num_bytes, cudaStream_t handle) {
  if (num_bytes == 0) return nullptr;
  check_range(dst, num_bytes);
  check_range(src, num_bytes);
  CompletionPtr done;
  {
    const std::lock_guard guard(runtime_mutex());
    Stream& stream = stream_of(handle);
    Task task = [=] { std::memmove(dst, src, num_bytes); };
    if (stream.capture == nullptr && is_pageable(src)) {
      const auto* bytes = static_cast<const std::byte*>(src);
      const auto staged = std::make_shared<std::vector<std::byte>>(bytes, bytes + num_bytes);
      task = [=] { std::memcpy(dst, staged->data(), num_bytes); };
    }
    done = submit(stream, {cudaGraphNodeTypeMemcpy, [=] { return task; }});
  }
  if (is_pageable(dst)) wait_for(done);
  return done;
}

void fill(void* dst, int value, size_t num_bytes, cudaStream_t handle) {
  if (num_bytes == 0) return;
  require(!is_pageable(dst), cudaErrorInvalidValue, "cudaMemset of memory that CUDA knows not of");
  check_range(dst, num_bytes);
  const std::lock_guard guard(runtime_mutex());
  const Task task = [=] { std::memset(dst, value, num_bytes); };
  submit(stream_of(handle), {cudaGraphNodeTypeMemset, [=] { return task; }});
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t num_bytes, cudaMemcpyKind,
                                       cudaStream_t stream) {
  return call([&] { copy(dst, src, num_bytes, stream); });
}

extern "C" cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src,
                                           int src_device, size_t num_bytes, cudaStream_t stream) {
  return call([&] {
    check_device(dst_device);
    check_device(src_device);
    copy(dst, src, num_bytes, stream);
  });
}

extern "C" cudaError_t cudaMemcpy(void* dst, const void* src, size_t num_bytes, cudaMemcpyKind) {
  return call([&] {
    refuse_while_capturing("cudaMemcpy");
    wait_for(copy(dst, src, num_bytes, nullptr));
  });
}

extern "C" cudaError_t cudaMemsetAsync(void* dst, int value, size_t num_bytes,
                                       cudaStream_t stream) {
  return call([&] { fill(dst, value, num_bytes, stream); });
}

extern "C" cudaError_t cudaMemset(void* dst, int value, size_t num_bytes) {
  return call([&] {
    refuse_while_capturing("cudaMemset");
    fill(dst, value, num_bytes, nullptr);
  });
}
