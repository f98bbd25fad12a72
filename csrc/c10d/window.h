// torch's one-sided windows, which torch has from 2.15 on, over rota's (tensor/window.h).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

#include "tensor/window.h"

namespace rota::c10d_backend {

// Makes a window of a tensor for these ranks, over a store that is used for nothing else.
// Collective; blocks.
using MakeWindow = std::function<std::shared_ptr<tensors::TensorWindow>(
    const at::Tensor& tensor, const c10::intrusive_ptr<::c10d::Store>& store, int rank,
    int world_size)>;

#if defined(C10D_BACKEND_HAS_WINDOW)

// Accesses block until they are done, so the works of all but wait_signal() are complete at once.
class WindowRota final : public ::c10d::Window {
 public:
  using Register = std::function<std::shared_ptr<tensors::TensorWindow>(const at::Tensor&)>;
  explicit WindowRota(Register make) : make_(std::move(make)) {}

  // Moves the tensor's storage to shared memory, and keeps it, whether or not it is `owning`.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<::c10d::Work> put(const at::Tensor& tensor, int64_t rank, int64_t offset,
                                       bool async_op, const ::c10d::PutOptions& opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<::c10d::Work> signal(int64_t rank, bool async_op,
                                          const ::c10d::SignalOptions& opts) override;
  // With async_op a thread of its own waits.
  c10::intrusive_ptr<::c10d::Work> wait_signal(int64_t rank, bool async_op,
                                               const ::c10d::WaitSignalOptions& opts) override;
  ::c10d::WindowAttr get_attr(int64_t) override { return {::c10d::WindowAccessType::UNIFIED}; }

 private:
  tensors::TensorWindow& registered(const char* call) const;

  const Register make_;
  std::shared_ptr<tensors::TensorWindow> window_;  // null: no tensor is registered
};

#endif

}  // namespace rota::c10d_backend
