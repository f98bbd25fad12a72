#include "cuda/graph_keep.h"

#include <mutex>
#include <utility>
#include <vector>

#include "cuda/stream_order.h"
#include "transport/cuda_error.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;
using Object = std::shared_ptr<void>;

struct Left {
  std::mutex mutex;
  std::vector<Object> objects;
};

// Never destroyed: graphs may end after main() does.
Left& left() {
  static auto* const all = new Left;
  return *all;
}

void CUDART_CB leave(void* kept) {
  const std::unique_ptr<Object> object(static_cast<Object*>(kept));
  const std::lock_guard lock(left().mutex);
  left().objects.push_back(std::move(*object));
}

}  // namespace

void keep_in_graph(Stream stream, std::shared_ptr<void> object) {
  auto kept = std::make_unique<Object>(std::move(object));
  cudaUserObject_t handle = nullptr;
  check_cuda(cudaUserObjectCreate(&handle, kept.get(), &leave, 1, cudaUserObjectNoDestructorSync),
             "cudaUserObjectCreate");
  kept.release();
  const cudaError_t error =
      cudaGraphRetainUserObject(captured_on(stream).graph, handle, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) transport::forget_error(cudaUserObjectRelease(handle, 1));
  check_cuda(error, "cudaGraphRetainUserObject");
}

void destroy_left_by_graphs() {
  std::vector<Object> objects;
  {
    const std::lock_guard lock(left().mutex);
    objects.swap(left().objects);
  }
}

}  // namespace rota::cuda
