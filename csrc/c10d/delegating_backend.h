// Runs collectives of CUDA tensors for which rota has no kernels on another backend, made when
// first needed. For CPU tensors they raise, as in any backend that lacks a collective.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

namespace rota::c10d_backend {

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;

class DelegatingBackend : public ::c10d::Backend {
 public:
  // Called when the delegate is first needed, with the collective that needs it; warns about it
  // once. May throw.
  using MakeDelegate = std::function<BackendPtr(const std::string& collective)>;

  DelegatingBackend(int rank, int world_size, MakeDelegate make_delegate)
      : Backend(rank, world_size), make_delegate_(std::move(make_delegate)) {}

  WorkPtr reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) final;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const ::c10d::GatherOptions& opts) final;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const ::c10d::ScatterOptions& opts) final;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const ::c10d::ReduceScatterOptions& opts) final;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const ::c10d::AllToAllOptions& opts) final;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const ::c10d::AllToAllOptions& opts) final;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 protected:
  // Null until it is needed.
  const BackendPtr& delegate() const { return delegate_; }

 private:
  // Makes the delegate if needed. Throws torch's error for an unsupported collective, unless these
  // are CUDA tensors.
  ::c10d::Backend& delegate_for(const char* collective, const at::Tensor& tensor);
  ::c10d::Backend& delegate_for(const char* collective, const std::vector<at::Tensor>& tensors);

  MakeDelegate make_delegate_;
  BackendPtr delegate_;
};

}  // namespace rota::c10d_backend
