#include "tensor/heap_tensor.h"

#include <ATen/ops/from_blob.h>

#include "base/error.h"
#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::tensors {
namespace {

size_t num_bytes_of(at::IntArrayRef size, at::ScalarType dtype) {
  size_t num_bytes = c10::elementSize(dtype);
  for (const int64_t length : size) {
    if (length < 0) {
      throw Error(ErrorKind::kValue,
                  join("rota.empty: a length of ", length, ", expected 0 or more"));
    }
    if (__builtin_mul_overflow(num_bytes, static_cast<size_t>(length), &num_bytes)) {
      throw Error(ErrorKind::kValue, "rota.empty: more bytes than 64 bits can count");
    }
  }
  return num_bytes;
}

}  // namespace

at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype) {
  auto& heap = per_process<transport::Heap>();
  void* data = heap.allocate(num_bytes_of(size, dtype));
  return at::from_blob(data, size, [&heap](void* block) { heap.release(block); }, dtype);
}

}  // namespace rota::tensors
