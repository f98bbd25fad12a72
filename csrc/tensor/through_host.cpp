#include "tensor/through_host.h"

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "tensor/tensor_checks.h"
#include "tensor/tensor_communicator.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse(std::string_view call) {
  throw Error(ErrorKind::kTransport,
              join("rota.", call,
                   ": the GPUs could not be joined, and it does not go through the "
                   "host's memory; use all_reduce, broadcast or all_gather, or NCCL"));
}

}  // namespace

template <typename Body>
WorkRef ThroughHost::run(Launch mode, ::c10d::OpType op_type, std::vector<at::Tensor> tensors,
                         size_t num_results, const Body& body) {
  if (is_capturing(device_)) {
    throw Error(
        ErrorKind::kValue,
        "rota: this collective goes through the host's memory here (a message on stderr said "
        "why), which a CUDA graph cannot capture; call it outside of the capture");
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "collective", device_);
    copies.push_back(tensor.contiguous().cpu());
  }
  body(at::TensorList(copies));
  for (size_t i = 0; i < num_results; ++i) tensors[i].copy_(copies[i]);
  if (mode == Launch::kBlocking) return {};
  tensors.resize(num_results);
  return HostWork::completed(host_.rank(), op_type, std::move(tensors));
}

WorkRef ThroughHost::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                Launch mode) {
  return run(mode, ::c10d::OpType::ALLREDUCE, tensors.vec(), tensors.size(),
             [&](at::TensorList copies) { host_.all_reduce(copies, options, Launch::kBlocking); });
}

WorkRef ThroughHost::reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                                   Launch mode) {
  std::vector<at::Tensor> tensors{bucket, options.stats};
  if (options.residual) tensors.push_back(*options.residual);
  return run(mode, ::c10d::OpType::ALLREDUCE, tensors, tensors.size(), [&](at::TensorList copies) {
    BucketOptions on_host = options;
    on_host.stats = copies[1];
    if (options.residual) on_host.residual = copies[2];
    host_.reduce_bucket(copies[0], on_host, Launch::kBlocking);
  });
}

WorkRef ThroughHost::broadcast(at::TensorList tensors, int root, Launch mode) {
  return run(mode, ::c10d::OpType::BROADCAST, tensors.vec(), tensors.size(),
             [&](at::TensorList copies) { host_.broadcast(copies, root, Launch::kBlocking); });
}

WorkRef ThroughHost::all_gather(const std::vector<AllGatherTensors>& gathers, Launch mode) {
  std::vector<at::Tensor> tensors;  // all outputs, then all inputs
  for (const AllGatherTensors& gather : gathers) {
    tensors.insert(tensors.end(), gather.outputs.begin(), gather.outputs.end());
  }
  const size_t num_outputs = tensors.size();
  for (const AllGatherTensors& gather : gathers) tensors.push_back(gather.input);
  return run(mode, ::c10d::OpType::ALLGATHER, tensors, num_outputs, [&](at::TensorList copies) {
    std::vector<AllGatherTensors> on_host;
    size_t next = 0;
    for (size_t i = 0; i < gathers.size(); ++i) {
      const size_t num_ranks = gathers[i].outputs.size();
      on_host.push_back({copies.slice(next, num_ranks).vec(), copies[num_outputs + i]});
      next += num_ranks;
    }
    host_.all_gather(std::move(on_host), Launch::kBlocking);
  });
}

WorkRef ThroughHost::reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp, Launch) {
  refuse("reduce_scatter");
}

WorkRef ThroughHost::send(const at::Tensor&, int, Launch) { refuse("send"); }

WorkRef ThroughHost::recv(const at::Tensor&, int, Launch) { refuse("recv"); }

}  // namespace rota::tensors
