#include "tensor/heap_tensor.h"

#include <ATen/ops/from_blob.h>

#include <map>

#include "base/fork_generation.h"
#include "base/per_process.h"
#include "cpu/copy.h"
#include "tensor/gil.h"
#include "tensor/tensor_memory.h"
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

struct HeapBlock {
  transport::Heap& heap;
  void* data;
};

void release(void* context) {
  const std::unique_ptr<HeapBlock> block(static_cast<HeapBlock*>(context));
  block->heap.release(block->data);
}

// Deletes a storage that lies in another tensor's memory.
void let_go(void* place) { delete static_cast<at::Tensor*>(place); }

}  // namespace

at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype) {
  auto& heap = per_process<transport::Heap>();
  void* data = heap.allocate(num_bytes_of(size, dtype));
  return at::from_blob(data, size, [&heap](void* block) { heap.release(block); }, dtype);
}

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

void move_to_heap(const at::Tensor& tensor, std::string_view call, bool counts_tensor) {
  auto& heap = per_process<transport::Heap>();
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (heap.offset_of(storage.data())) return;
  if (!storage.resizable()) {
    throw Error(
        ErrorKind::kValue,
        join("rota.", call,
             ": the tensor's memory belongs to another library, or is shared already (also with a "
             "numpy array), so it cannot move; pass a tensor that torch or rota.empty has made"));
  }
  if (may_be_held_elsewhere(tensor, counts_tensor)) {
    throw Error(
        ErrorKind::kValue,
        join("rota.", call,
             ": the tensor's memory would move, but something else may use it where it is: a view, "
             "detach(), a DLPack export, autograd, DDP or a pending operation; pass a tensor that "
             "rota.empty has made, or make the window before them"));
  }
  const void* source = storage.mutable_data();  // gives a lazy clone memory of its own
  auto block = std::make_unique<HeapBlock>(heap, heap.allocate(storage.nbytes()));
  void* data = block->data;
  cpu::copy_bytes(data, source, storage.nbytes());
  storage.set_data_ptr_noswap(at::DataPtr(data, block.release(), &release, at::kCPU));
  storage.set_resizable(false);
}

bool move_storage(const at::Tensor& tensor, const at::Tensor& place, bool copies) {
  check_memory(tensor, "elastic.State");
  if (!tensor.is_cpu()) return false;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (!place.is_contiguous() || place.nbytes() != storage.nbytes()) {
    throw Error(ErrorKind::kValue, join("rota: a place of ", place.nbytes(), " bytes, expected ",
                                        storage.nbytes(), " contiguous ones"));
  }
  const bool was_moved = storage.data_ptr().get_deleter() == &let_go;
  if (!storage.resizable() && !was_moved) return false;
  if (may_be_held_elsewhere(tensor, /*counts_tensor=*/!tensor.requires_grad())) return false;
  void* data = place.data_ptr();
  const void* source = storage.mutable_data();  // as above
  if (copies) cpu::copy_bytes(data, source, storage.nbytes());
  storage.set_data_ptr_noswap(at::DataPtr(data, new at::Tensor(place), &let_go, at::kCPU));
  storage.set_resizable(false);
  return true;
}

}  // namespace rota::tensors
