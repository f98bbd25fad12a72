#include "tensor/staging_collectives.h"

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "tensor/connect_gpus.h"
#include "tensor/tensor_checks.h"

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
WorkRef StagingCollectives::run(Launch mode, ::c10d::OpType op_type,
                                std::vector<at::Tensor> tensors, size_t num_results,
                                const Body& body) {
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
  return HostWork::completed(cpu_.communicator()->rank(), op_type, std::move(tensors));
}

WorkRef StagingCollectives::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                       Launch mode) {
  return run(mode, ::c10d::OpType::ALLREDUCE, tensors.vec(), tensors.size(),
             [&](at::TensorList copies) { cpu_.all_reduce(copies, options, Launch::kBlocking); });
}

WorkRef StagingCollectives::reduce_bucket(const BucketTensors& tensors,
                                          const BucketOptions& options, Launch mode) {
  std::vector<at::Tensor> all{tensors.bucket, tensors.stats};
  if (tensors.residual) all.push_back(*tensors.residual);
  return run(mode, ::c10d::OpType::ALLREDUCE, all, all.size(), [&](at::TensorList copies) {
    BucketTensors staged{.bucket = copies[0], .stats = copies[1], .residual = std::nullopt};
    if (tensors.residual) staged.residual = copies[2];
    cpu_.reduce_bucket(staged, options, Launch::kBlocking);
  });
}

WorkRef StagingCollectives::broadcast(at::TensorList tensors, int root, Launch mode) {
  return run(mode, ::c10d::OpType::BROADCAST, tensors.vec(), tensors.size(),
             [&](at::TensorList copies) { cpu_.broadcast(copies, root, Launch::kBlocking); });
}

WorkRef StagingCollectives::all_gather(std::vector<AllGatherTensors> gathers, Launch mode) {
  std::vector<at::Tensor> tensors;  // all outputs, then all inputs
  for (const AllGatherTensors& gather : gathers) {
    tensors.insert(tensors.end(), gather.outputs.begin(), gather.outputs.end());
  }
  const size_t num_outputs = tensors.size();
  for (const AllGatherTensors& gather : gathers) tensors.push_back(gather.input);
  return run(mode, ::c10d::OpType::ALLGATHER, tensors, num_outputs, [&](at::TensorList copies) {
    std::vector<AllGatherTensors> staged;
    size_t next = 0;
    for (size_t i = 0; i < gathers.size(); ++i) {
      const size_t num_ranks = gathers[i].outputs.size();
      staged.push_back({copies.slice(next, num_ranks).vec(), copies[num_outputs + i]});
      next += num_ranks;
    }
    cpu_.all_gather(std::move(staged), Launch::kBlocking);
  });
}

WorkRef StagingCollectives::reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp, Launch) {
  refuse("reduce_scatter");
}

WorkRef StagingCollectives::send(const at::Tensor&, int, int64_t, Launch) { refuse("send"); }

WorkRef StagingCollectives::recv(const at::Tensor&, int, int64_t, Launch) { refuse("recv"); }

}  // namespace rota::tensors
