#include "c10d/delegating_backend.h"

namespace rota::c10d_backend {

::c10d::Backend& DelegatingBackend::delegate_for(const char* collective, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && tensor.is_cuda(), "Backend ", getBackendName(),
              " does not support ", collective, " of CPU tensors; use Gloo for it");
  if (!delegate_) delegate_ = make_delegate_(collective);
  return *delegate_;
}

::c10d::Backend& DelegatingBackend::delegate_for(const char* collective,
                                                 const std::vector<at::Tensor>& tensors) {
  return delegate_for(collective, tensors.empty() ? at::Tensor() : tensors[0]);
}

WorkPtr DelegatingBackend::reduce(std::vector<at::Tensor>& tensors,
                                  const ::c10d::ReduceOptions& opts) {
  return delegate_for("reduce", tensors).reduce(tensors, opts);
}

WorkPtr DelegatingBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                  std::vector<at::Tensor>& inputs,
                                  const ::c10d::GatherOptions& opts) {
  return delegate_for("gather", inputs).gather(outputs, inputs, opts);
}

WorkPtr DelegatingBackend::scatter(std::vector<at::Tensor>& outputs,
                                   std::vector<std::vector<at::Tensor>>& inputs,
                                   const ::c10d::ScatterOptions& opts) {
  return delegate_for("scatter", outputs).scatter(outputs, inputs, opts);
}

WorkPtr DelegatingBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) {
  return delegate_for("reduce_scatter", outputs).reduce_scatter(outputs, inputs, opts);
}

WorkPtr DelegatingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const ::c10d::ReduceScatterOptions& opts) {
  return delegate_for("reduce_scatter", input)._reduce_scatter_base(output, input, opts);
}

WorkPtr DelegatingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const ::c10d::AllToAllOptions& opts) {
  return delegate_for("alltoall_base", output)
      .alltoall_base(output, input, output_splits, input_splits, opts);
}

WorkPtr DelegatingBackend::alltoall(std::vector<at::Tensor>& outputs,
                                    std::vector<at::Tensor>& inputs,
                                    const ::c10d::AllToAllOptions& opts) {
  return delegate_for("alltoall", outputs).alltoall(outputs, inputs, opts);
}

WorkPtr DelegatingBackend::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  return delegate_for("send", tensors).send(tensors, peer, tag);
}

WorkPtr DelegatingBackend::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  return delegate_for("recv", tensors).recv(tensors, peer, tag);
}

WorkPtr DelegatingBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return delegate_for("recvAnysource", tensors).recvAnysource(tensors, tag);
}

}  // namespace rota::c10d_backend
