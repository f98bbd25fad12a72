#include "c10d/process_group.h"

#include "tensor/errors.h"
#include "tensor/heap_tensor.h"

namespace rota::c10d_backend {
namespace {

using ::c10d::OpType;

Launch launch_mode(bool is_async) { return is_async ? Launch::kAsync : Launch::kBlocking; }

ReduceOp reduce_op(const ::c10d::ReduceOp& op) {
  switch (static_cast<::c10d::ReduceOp::RedOpType>(op)) {
    case ::c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case ::c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case ::c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case ::c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case ::c10d::ReduceOp::PREMUL_SUM:
    case ::c10d::ReduceOp::UNUSED:
      break;
  }
  throw PythonError(Error(ErrorKind::kValue,
                          "rota.all_reduce: this reduce op is not supported; expected SUM, AVG, "
                          "PRODUCT, MIN, MAX, BAND, BOR or BXOR"));
}

const at::Tensor& only_tensor(std::string_view call, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "rota.", call, ": ", tensors.size(),
                    " tensors, expected one");
  return tensors[0];
}

}  // namespace

ProcessGroupRota::ProcessGroupRota(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                   int world_size, const TensorCommunicatorOptions& options,
                                   MakeDelegate make_delegate)
    : DelegatingBackend(rank, world_size, std::move(make_delegate)),
      communicator_(TensorCommunicator::make(store, rank, world_size, options)) {}

WorkPtr ProcessGroupRota::done_if_null(WorkRef work, OpType op_type, at::TensorList results) {
  if (work) return work;
  return HostWork::completed(getRank(), op_type, results.vec());
}

WorkPtr ProcessGroupRota::allreduce(std::vector<at::Tensor>& tensors,
                                    const ::c10d::AllreduceOptions& opts) {
  return done_if_null(communicator_->all_reduce(tensors, {.op = reduce_op(opts.reduceOp)},
                                                launch_mode(opts.asyncOp)),
                      OpType::ALLREDUCE, tensors);
}

WorkPtr ProcessGroupRota::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                              const ::c10d::AllreduceCoalescedOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPtr ProcessGroupRota::broadcast(std::vector<at::Tensor>& tensors,
                                    const ::c10d::BroadcastOptions& opts) {
  return done_if_null(
      communicator_->broadcast(tensors, static_cast<int>(opts.rootRank), launch_mode(opts.asyncOp)),
      OpType::BROADCAST, tensors);
}

WorkPtr ProcessGroupRota::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                    std::vector<at::Tensor>& inputs,
                                    const ::c10d::AllgatherOptions& opts) {
  return gather_all(zip(outputs, inputs), opts);
}

WorkPtr ProcessGroupRota::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                              std::vector<at::Tensor>& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  // Outputs are indexed by rank first: outputs[rank][i] belongs to inputs[i].
  std::vector<std::vector<at::Tensor>> outputs_by_input(inputs.size());
  for (const std::vector<at::Tensor>& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "rota.all_gather: ", of_rank.size(),
                      " outputs of a rank for ", inputs.size(), " inputs; expected as many");
    for (size_t i = 0; i < inputs.size(); ++i) outputs_by_input[i].push_back(of_rank[i]);
  }
  return gather_all(zip(outputs_by_input, inputs), opts);
}

WorkPtr ProcessGroupRota::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::AllgatherOptions& opts) {
  return gather_all({communicator_->split_by_rank(output, input)}, opts);
}

WorkPtr ProcessGroupRota::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                          std::vector<at::Tensor>& inputs,
                                                          const ::c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "rota.all_gather: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs; expected as many");
  std::vector<AllGatherTensors> gathers;
  for (size_t i = 0; i < inputs.size(); ++i) {
    gathers.push_back(communicator_->split_by_rank(outputs[i], inputs[i]));
  }
  return gather_all(std::move(gathers), opts);
}

WorkPtr ProcessGroupRota::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::ReduceScatterOptions& opts) {
  if (input.is_cuda() && !communicator_->has_reduce_scatter(input)) {
    return DelegatingBackend::_reduce_scatter_base(output, input, opts);
  }
  return done_if_null(communicator_->reduce_scatter(output, input, reduce_op(opts.reduceOp),
                                                    launch_mode(opts.asyncOp)),
                      OpType::REDUCE_SCATTER, output);
}

// If rota cannot join the GPUs, NCCL may still connect them. Tags of CUDA tensors are ignored, as
// in NCCL.
WorkPtr ProcessGroupRota::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  if (!has_transfers_of(tensors)) return DelegatingBackend::send(tensors, peer, tag);
  return communicator_->send(only_tensor("send", tensors), peer, tag, Launch::kAsync);
}

WorkPtr ProcessGroupRota::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  if (!has_transfers_of(tensors)) return DelegatingBackend::recv(tensors, peer, tag);
  return communicator_->recv(only_tensor("recv", tensors), peer, tag, Launch::kAsync);
}

WorkPtr ProcessGroupRota::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  const at::Tensor& tensor = only_tensor("recv", tensors);
  if (tensor.is_cuda()) return DelegatingBackend::recvAnysource(tensors, tag);
  return communicator_->recv(tensor, kAnyRank, tag, Launch::kAsync);
}

WorkPtr ProcessGroupRota::barrier(const ::c10d::BarrierOptions& opts) {
  return done_if_null(communicator_->barrier(launch_mode(opts.asyncOp)), OpType::BARRIER, {});
}

at::Tensor ProcessGroupRota::allocateTensor(long num_elems, at::TensorOptions options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "rota.empty: a tensor on ", options.device(),
                    ", expected the CPU; make it with torch.empty");
  return with_python_errors(
      [&] { return make_heap_tensor(num_elems, options.dtype().toScalarType()); });
}

bool ProcessGroupRota::has_transfers_of(const std::vector<at::Tensor>& tensors) const {
  return tensors.empty() || !tensors[0].is_cuda() || communicator_->has_transfers();
}

void ProcessGroupRota::shutdown() {
  if (delegate()) delegate()->shutdown();
  communicator_->close();
}

void ProcessGroupRota::abort() {
  if (delegate()) delegate()->abort();
  communicator_->abort(join("rank ", getRank(), " aborted its process group"));
}

std::vector<AllGatherTensors> ProcessGroupRota::zip(
    const std::vector<std::vector<at::Tensor>>& outputs, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "rota.all_gather: ", outputs.size(),
                    " lists of outputs for ", inputs.size(), " inputs; expected as many");
  std::vector<AllGatherTensors> gathers;
  for (size_t i = 0; i < inputs.size(); ++i) gathers.push_back({outputs[i], inputs[i]});
  return gathers;
}

WorkPtr ProcessGroupRota::gather_all(std::vector<AllGatherTensors> gathers,
                                     const ::c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> results;
  for (const AllGatherTensors& gather : gathers) {
    results.insert(results.end(), gather.outputs.begin(), gather.outputs.end());
  }
  return done_if_null(communicator_->all_gather(std::move(gathers), launch_mode(opts.asyncOp)),
                      OpType::ALLGATHER, results);
}

}  // namespace rota::c10d_backend
