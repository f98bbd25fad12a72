#include "tensor/heap_pool.h"

#include <ATen/ops/from_blob.h>

#include <map>
#include <mutex>

#include "base/fork_generation.h"
#include "tensor/gil.h"
#include "tensor/heap_tensor.h"

namespace rota::tensors {

// The blocks that no tensor uses.
struct HeapPool::Idle {
  const uint64_t fork_generation_ = fork_generation();
  std::mutex mutex;
  std::multimap<size_t, at::Tensor> blocks;  // by bytes

  at::Tensor take(size_t num_bytes) {
    if (fork_generation_ != fork_generation()) return {};  // the parent still writes to them
    const GilFreeLock lock(mutex);
    auto found = blocks.extract(num_bytes);
    return found ? std::move(found.mapped()) : at::Tensor();
  }

  void give_back(at::Tensor block) {
    const GilFreeLock lock(mutex);
    blocks.emplace(block.nbytes(), std::move(block));
  }
};

HeapPool::HeapPool() : idle_(std::make_shared<Idle>()) {}

at::Tensor HeapPool::empty(int64_t num_elems, at::ScalarType dtype) {
  at::Tensor block = idle_->take(static_cast<size_t>(num_elems) * c10::elementSize(dtype));
  if (!block.defined()) block = make_heap_tensor(num_elems, dtype);
  const std::weak_ptr<Idle> weak = idle_;
  return at::from_blob(
      block.data_ptr(), num_elems,
      [weak, block](void*) {
        if (const auto idle = weak.lock()) idle->give_back(block);
      },
      dtype);
}

}  // namespace rota::tensors
