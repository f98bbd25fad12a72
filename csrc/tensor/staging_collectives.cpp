#include "tensor/staging_collectives.h"

#include <ATen/core/grad_mode.h>

#include "tensor/gpus.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse(std::string_view call) {
  throw Error(ErrorKind::kTransport,
              join("rota.", call,
                   ": the GPUs could not be joined, or have no kernel for it between hosts, and it "
                   "does not go through the host's memory; use all_reduce, broadcast or "
                   "all_gather, or NCCL"));
}

}  // namespace

void StagingCollectives::check_not_capturing() const {
  if (!is_capturing(device_)) return;
  throw Error(ErrorKind::kValue,
              "rota: this collective goes through the host's memory here (a message on stderr said "
              "why), which a CUDA graph cannot capture; call it outside of the capture");
}

WorkRef StagingCollectives::done(Launch mode, CollectiveKind kind,
                                 std::vector<at::Tensor> results) const {
  if (mode == Launch::kBlocking) return {};
  return HostWork::completed(rank_, op_type_of(kind), std::move(results));
}

// The others run faster on NCCL, where it can join the GPUs.
bool StagingCollectives::supports(const Operation& operation) const {
  return operation.kind == CollectiveKind::kAllReduce ||
         operation.kind == CollectiveKind::kBroadcast ||
         operation.kind == CollectiveKind::kAllGather;
}

WorkRef StagingCollectives::run(OperationList operations, Launch mode) {
  check_not_capturing();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const Operation& operation : operations) {
    if (!supports(operation)) refuse(name(operation.kind));
    for (const at::TensorList side : {operation.inputs, operation.outputs}) {
      for (const at::Tensor& tensor : side) check_tensor(tensor, name(operation.kind), device_);
    }
  }
  check_apart(operations);
  for (const Operation& operation : operations) {
    const auto copy = [&](at::TensorList tensors) {
      std::vector<at::Tensor> copies;
      for (const at::Tensor& tensor : tensors) {
        copies.push_back(as_copyable(tensor).contiguous().cpu().view(tensor.scalar_type()));
      }
      return copies;
    };
    const std::vector<at::Tensor> inputs = copy(operation.inputs);
    const std::vector<at::Tensor> outputs = copy(operation.outputs);
    Operation staged = operation;
    staged.inputs = inputs;
    staged.outputs = outputs;
    cpu_.run(staged, Launch::kBlocking);
    for (size_t i = 0; i < outputs.size(); ++i)
      as_copyable(operation.outputs[i]).copy_(as_copyable(outputs[i]));
    results.insert(results.end(), operation.outputs.begin(), operation.outputs.end());
  }
  return operations.empty() ? WorkRef() : done(mode, operations[0].kind, std::move(results));
}

WorkRef StagingCollectives::reduce_bucket(const BucketTensors& tensors,
                                          const BucketOptions& options, Launch mode) {
  check_not_capturing();
  const at::NoGradGuard no_grad;
  const auto copy = [&](const at::Tensor& tensor) {
    check_tensor(tensor, "reduce_bucket", device_);
    return tensor.contiguous().cpu();
  };
  BucketTensors staged{
      .bucket = copy(tensors.bucket), .stats = copy(tensors.stats), .residual = std::nullopt};
  if (tensors.residual) staged.residual = copy(*tensors.residual);
  cpu_.reduce_bucket(staged, options, Launch::kBlocking);
  tensors.bucket.copy_(staged.bucket);
  tensors.stats.copy_(staged.stats);
  if (tensors.residual) tensors.residual->copy_(*staged.residual);
  return done(mode, CollectiveKind::kReduceBucket, {tensors.bucket});
}

WorkRef StagingCollectives::transfer(Direction direction, const at::Tensor&, int, int64_t, Launch) {
  refuse(name(direction));
}

}  // namespace rota::tensors
