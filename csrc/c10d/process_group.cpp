#include "c10d/process_group.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tensor/errors.h"
#include "tensor/gil.h"
#include "tensor/heap_tensor.h"

namespace rota::c10d_backend {
namespace {

// A reduction of c10d, without its tensors.
Operation reduction_of(CollectiveKind kind, const ::c10d::ReduceOp& op, const OrderOptions& order) {
  const auto by = [&](ReduceOp own, std::optional<double> premul_factor = {}) -> Operation {
    return {.kind = kind, .reduction = {.op = own, .order = order}, .premul_factor = premul_factor};
  };
  switch (static_cast<::c10d::ReduceOp::RedOpType>(op)) {
    case ::c10d::ReduceOp::SUM:
      return by(ReduceOp::kSum);
    case ::c10d::ReduceOp::AVG:
      return by(ReduceOp::kAvg);
    case ::c10d::ReduceOp::PRODUCT:
      return by(ReduceOp::kProduct);
    case ::c10d::ReduceOp::MIN:
      return by(ReduceOp::kMin);
    case ::c10d::ReduceOp::MAX:
      return by(ReduceOp::kMax);
    case ::c10d::ReduceOp::BAND:
      return by(ReduceOp::kBand);
    case ::c10d::ReduceOp::BOR:
      return by(ReduceOp::kBor);
    case ::c10d::ReduceOp::BXOR:
      return by(ReduceOp::kBxor);
    case ::c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor =
          dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor == nullptr) break;
      const bool is_tensor = factor->tensor_factor.defined();
      return by(ReduceOp::kSum,
                is_tensor ? factor->tensor_factor.item<double>() : factor->double_factor);
    }
    case ::c10d::ReduceOp::UNUSED:
      break;
  }
  throw PythonError(Error(ErrorKind::kValue,
                          join("rota.", name(kind),
                               ": this reduce op is not supported; expected SUM, AVG, PRODUCT, "
                               "MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM with its factor")));
}

// Stands for a group before its first reconfigure(): every call raises.
std::shared_ptr<TensorCommunicator> without_members() {
  auto communicator = TensorCommunicator::make(c10::make_intrusive<::c10d::HashStore>(), /*rank=*/0,
                                               /*world_size=*/1, std::chrono::seconds(1),
                                               {.check_interrupt = [] {}});
  communicator->abort("this process group has no members; call reconfigure");
  return communicator;
}

constexpr auto kFixedMembers =
    "rota: the members of this process group are fixed; make it by init_process_group with "
    "enable_reconfigure=True";

const at::Tensor& only_tensor(std::string_view call, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "rota.", call, ": ", tensors.size(),
                    " tensors, expected one");
  return tensors[0];
}

// One tensor, or a list with one for each rank.
at::TensorList by_rank(std::string_view, const at::Tensor& tensor, int) { return tensor; }
at::TensorList by_rank(std::string_view call, const Tensors& tensors, int world_size) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(world_size), "rota.", call,
                    ": a list of ", tensors.size(), " tensors, expected world_size = ", world_size);
  return tensors;
}

// The list of the root, or none on other ranks, where c10d passes an empty list of lists.
at::TensorList list_of_root(std::string_view call, const std::vector<Tensors>& lists,
                            int world_size) {
  TORCH_CHECK_VALUE(lists.size() <= 1, "rota.", call, ": ", lists.size(),
                    " lists of tensors, expected one");
  if (lists.empty() || lists[0].empty()) return {};
  return by_rank(call, lists[0], world_size);
}

Operations each_in_place(Operation operation, const Tensors& tensors) {
  Operations operations;
  for (const at::Tensor& tensor : tensors) {
    operation.outputs = tensor;
    operations.push_back(operation);
  }
  return operations;
}

// The operation with each pair of inputs and outputs.
template <typename Inputs, typename Outputs>
Operations of_pairs(Operation operation, const Inputs& inputs, const Outputs& outputs,
                    int world_size) {
  const std::string_view call = name(operation.kind);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "rota.", call, ": ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs; expected as many");
  Operations operations;
  for (size_t i = 0; i < inputs.size(); ++i) {
    operation.inputs = by_rank(call, inputs[i], world_size);
    operation.outputs = by_rank(call, outputs[i], world_size);
    operations.push_back(operation);
  }
  return operations;
}

// Rounds a wider float to the wire dtype.
void set_wire(Operation& operation, at::ScalarType wire_dtype) {
  const at::Tensor& tensor = operation.outputs[0];
  if (!tensor.is_floating_point() || tensor.dtype().itemsize() <= c10::elementSize(wire_dtype))
    return;
  operation.reduction.wire = reducible_dtype(wire_dtype, "all_reduce", "wire_dtype");
}

// In elements: c10d counts splits in slices along the first dimension.
std::vector<int64_t> in_elems(std::vector<int64_t> splits, const at::Tensor& tensor) {
  const bool is_empty = tensor.dim() == 0 || tensor.size(0) == 0;
  const int64_t slice_elems = is_empty ? 1 : tensor.numel() / tensor.size(0);
  for (int64_t& split : splits) split *= slice_elems;
  return splits;
}

}  // namespace

ProcessGroupRota::ProcessGroupRota(const StorePtr& store, int rank, int world_size,
                                   OptionsPtr options, MakeDelegate make_delegate,
                                   MakeWindow make_window, std::optional<Membership> membership)
    : Backend(membership ? 0 : rank, membership ? 1 : world_size),
      store_(store),
      options_(std::move(options)),
      communicator_(membership ? without_members()
                               : TensorCommunicator::make(store, rank, world_size,
                                                          options_->timeout, *options_)),
      make_delegate_(std::move(make_delegate)),
      make_window_(std::move(make_window)),
      membership_(std::move(membership)) {}

template <typename Issue>
WorkPtr ProcessGroupRota::call(const Issue& issue) {
  Block* const block = this->block();
  if (block == nullptr) {
    ++num_calls_;
    return issue();
  }
  start_transfers(*block);
  return call_in(*block, issue);
}

template <typename Issue>
WorkPtr ProcessGroupRota::call_in(Block& block, Issue& issue) {
  ++num_calls_;
  WorkPtr work = HostWork::completed(getRank(), ::c10d::OpType::UNKNOWN, {});  // of a failed call
  const auto keep_error = [&] {
    if (!block.error) block.error = std::current_exception();
  };
  // Others, such as a signal handler's, leave the block at once.
  try {
    work = issue();
  } catch (const PythonError&) {
    keep_error();
  } catch (const c10::Error&) {
    keep_error();
  }
  block.works.push_back(work);
  return work;
}

ProcessGroupRota::Block* ProcessGroupRota::block() {
  if (num_blocks_ == 0) return nullptr;
  Block* const block = [&]() -> Block* {
    const GilFreeLock lock(blocks_mutex_);
    const auto found = blocks_.find(std::this_thread::get_id());
    return found == blocks_.end() ? nullptr : found->second.get();
  }();
  if (block == nullptr || !block->is_left) return block;
  start_transfers(*end_block());
  return nullptr;
}

std::shared_ptr<ProcessGroupRota::Block> ProcessGroupRota::end_block() {
  const GilFreeLock lock(blocks_mutex_);
  --num_blocks_;
  return std::move(blocks_.extract(std::this_thread::get_id()).mapped());
}

WorkPtr ProcessGroupRota::run_own(OperationList operations, bool is_async) {
  const auto called = HostWork::Clock::now();
  const WorkRef work =
      communicator_->run(operations, is_async ? Launch::kAsync : Launch::kBlocking);
  Tensors results = work ? Tensors() : results_of(operations);
  return work_of(work, operations[0].kind, std::move(results), called);
}

template <typename Make, typename Method, typename... Args>
WorkPtr ProcessGroupRota::run(const Make& make, Method on_delegate, Args&... args) {
  const auto& opts = std::get<sizeof...(Args) - 1>(std::tie(args...));
  return call([&]() -> WorkPtr {
    Operations operations = make();
    for (Operation& operation : operations) operation.timeout = own_timeout(opts.timeout);
    if (operations.empty()) return HostWork::completed(getRank(), ::c10d::OpType::UNKNOWN, {});
    const Operation& first = operations[0];
    const at::Tensor& tensor = first.any_tensor();
    if (tensor.defined() && tensor.is_cuda() && !communicator_->supports(first)) {
      return (delegate_for(name(first.kind)).*on_delegate)(args...);
    }
    return run_own(operations, opts.asyncOp);
  });
}

WorkPtr ProcessGroupRota::work_of(const WorkRef& work, CollectiveKind kind, Tensors results,
                                  HostWork::Clock::time_point called) const {
  if (work) return work;
  return HostWork::completed(getRank(), op_type_of(kind), std::move(results), called);
}

::c10d::Backend& ProcessGroupRota::delegate_for(std::string_view collective) {
  if (!delegate_) delegate_ = make_delegate_(std::string(collective), store_, getRank(), getSize());
  return *delegate_;
}

void ProcessGroupRota::startCoalescing() {
  TORCH_CHECK(block() == nullptr,
              "rota: startCoalescing() in a coalesced call; end that one first");
  const auto begun = std::make_shared<Block>();
  if (options_->watch_block) {
    options_->watch_block([weak = std::weak_ptr(begun)] {
      if (const auto block = weak.lock()) block->is_left = true;
    });
  }
  const GilFreeLock lock(blocks_mutex_);
  blocks_[std::this_thread::get_id()] = begun;  // unless the block is refused
  ++num_blocks_;
}

WorkPtr ProcessGroupRota::endCoalescing() {
  TORCH_CHECK(block() != nullptr, "rota: endCoalescing() without startCoalescing()");
  const auto block = end_block();
  start_transfers(*block);
  if (block->error) std::rethrow_exception(block->error);
  return c10::make_intrusive<JointWork>(getRank(), std::move(block->works));
}

WorkPtr ProcessGroupRota::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  // As on Gloo, sparse CPU tensors come this way.
  if (!tensors.empty() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const auto make = [&] {
    Operations operations = each_in_place(
        reduction_of(CollectiveKind::kAllReduce, opts.reduceOp, options_->order), tensors);
    if (options_->wire_dtype) {
      for (Operation& operation : operations) set_wire(operation, *options_->wire_dtype);
    }
    return operations;
  };
  return run(make, &Backend::allreduce, tensors, opts);
}

WorkPtr ProcessGroupRota::allreduce_coalesced(Tensors& tensors,
                                              const ::c10d::AllreduceCoalescedOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPtr ProcessGroupRota::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  return call([&]() -> WorkPtr {
    const at::Tensor& tensor = only_tensor("all_reduce", tensors);
    if (tensor.is_cuda()) return delegate_for("all_reduce").allreduce_sparse(tensors, opts);
    const Operation operation =
        reduction_of(CollectiveKind::kAllReduce, opts.reduceOp, options_->order);
    TORCH_CHECK_VALUE(operation.reduction.op == ReduceOp::kSum && !operation.premul_factor,
                      "rota.all_reduce: sparse tensors support SUM only");
    const auto called = HostWork::Clock::now();
    const Launch mode = opts.asyncOp ? Launch::kAsync : Launch::kBlocking;
    return work_of(communicator_->all_reduce_sparse(tensor, mode, own_timeout(opts.timeout)),
                   CollectiveKind::kAllReduce, tensors, called);
  });
}

WorkPtr ProcessGroupRota::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const auto make = [&] {
    Operation operation = reduction_of(CollectiveKind::kReduce, opts.reduceOp, options_->order);
    operation.root = static_cast<int>(opts.rootRank);
    return each_in_place(operation, tensors);
  };
  return run(make, &Backend::reduce, tensors, opts);
}

WorkPtr ProcessGroupRota::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const ::c10d::ReduceScatterOptions& opts) {
  const auto make = [&] {
    return of_pairs(reduction_of(CollectiveKind::kReduceScatter, opts.reduceOp, options_->order),
                    inputs, outputs, getSize());
  };
  return run(make, &Backend::reduce_scatter, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::ReduceScatterOptions& opts) {
  const auto make = [&] {
    return of_pairs(reduction_of(CollectiveKind::kReduceScatter, opts.reduceOp, options_->order),
                    at::TensorList(input), at::TensorList(output), getSize());
  };
  return run(make, &Backend::_reduce_scatter_base, output, input, opts);
}

WorkPtr ProcessGroupRota::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) {
  const auto make = [&] {
    return of_pairs(reduction_of(CollectiveKind::kReduceScatter, opts.reduceOp, options_->order),
                    inputs, outputs, getSize());
  };
  return run(make, &Backend::reduce_scatter_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const auto make = [&] {
    return each_in_place(
        {.kind = CollectiveKind::kBroadcast, .root = static_cast<int>(opts.rootRank)}, tensors);
  };
  return run(make, &Backend::broadcast, tensors, opts);
}

WorkPtr ProcessGroupRota::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const ::c10d::AllgatherOptions& opts) {
  const auto make = [&] {
    return of_pairs({.kind = CollectiveKind::kAllGather}, inputs, outputs, getSize());
  };
  return run(make, &Backend::allgather, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::AllgatherOptions& opts) {
  const auto make = [&] {
    return of_pairs({.kind = CollectiveKind::kAllGather}, at::TensorList(input),
                    at::TensorList(output), getSize());
  };
  return run(make, &Backend::_allgather_base, output, input, opts);
}

WorkPtr ProcessGroupRota::all_gather_in(const at::Tensor& output, const at::Tensor& input,
                                        const WireFormat& wire, bool is_async) {
  return call([&] {
    return run_own(
        Operation{
            .kind = CollectiveKind::kAllGather, .inputs = input, .outputs = output, .wire = wire},
        is_async);
  });
}

WorkPtr ProcessGroupRota::reduce_scatter_in(const at::Tensor& output, const at::Tensor& input,
                                            const ::c10d::ReduceOp& op, DType wire_dtype,
                                            bool is_async) {
  return call([&] {
    Operation operation = reduction_of(CollectiveKind::kReduceScatter, op, options_->order);
    operation.inputs = input;
    operation.outputs = output;
    operation.wire = WireFormat{wire_dtype};
    return run_own(operation, is_async);
  });
}

WorkPtr ProcessGroupRota::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  // Outputs are indexed by rank first: outputs[rank][i] belongs to inputs[i]. Where one is missing,
  // allgather() refuses the list.
  std::vector<Tensors> outputs_by_input(inputs.size());
  for (const Tensors& of_rank : outputs) {
    outputs_by_input.resize(std::max(outputs_by_input.size(), of_rank.size()));
    for (size_t i = 0; i < of_rank.size(); ++i) outputs_by_input[i].push_back(of_rank[i]);
  }
  return allgather(outputs_by_input, inputs, opts);
}

WorkPtr ProcessGroupRota::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::AllgatherOptions& opts) {
  const auto make = [&] {
    return of_pairs({.kind = CollectiveKind::kAllGather}, inputs, outputs, getSize());
  };
  return run(make, &Backend::allgather_into_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const ::c10d::GatherOptions& opts) {
  const auto make = [&]() -> Operations {
    return {{.kind = CollectiveKind::kGather,
             .inputs = inputs,
             .outputs = list_of_root("gather", outputs, getSize()),
             .root = static_cast<int>(opts.rootRank)}};
  };
  return run(make, &Backend::gather, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const ::c10d::ScatterOptions& opts) {
  const auto make = [&]() -> Operations {
    return {{.kind = CollectiveKind::kScatter,
             .inputs = list_of_root("scatter", inputs, getSize()),
             .outputs = outputs,
             .root = static_cast<int>(opts.rootRank)}};
  };
  return run(make, &Backend::scatter, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const ::c10d::AllToAllOptions& opts) {
  const std::vector<int64_t> input_elems = in_elems(input_splits, input);
  const std::vector<int64_t> output_elems = in_elems(output_splits, output);
  const auto make = [&]() -> Operations {
    return {{.kind = CollectiveKind::kAllToAll,
             .inputs = input,
             .outputs = output,
             .input_splits = input_elems,
             .output_splits = output_elems}};
  };
  return run(make, &Backend::alltoall_base, output, input, output_splits, input_splits, opts);
}

WorkPtr ProcessGroupRota::alltoall(Tensors& outputs, Tensors& inputs,
                                   const ::c10d::AllToAllOptions& opts) {
  const auto make = [&]() -> Operations {
    return {{.kind = CollectiveKind::kAllToAll,
             .inputs = by_rank("all_to_all", inputs, getSize()),
             .outputs = by_rank("all_to_all", outputs, getSize())}};
  };
  return run(make, &Backend::alltoall, outputs, inputs, opts);
}

WorkPtr ProcessGroupRota::send(Tensors& tensors, int peer, int tag) {
  return transfer(Direction::kSend, tensors, peer, tag);
}

WorkPtr ProcessGroupRota::recv(Tensors& tensors, int peer, int tag) {
  return transfer(Direction::kRecv, tensors, peer, tag);
}

// If rota cannot join the GPUs, NCCL may still connect them. Tags of CUDA tensors are ignored, as
// in NCCL.
WorkPtr ProcessGroupRota::transfer(Direction direction, Tensors& tensors, int peer, int tag) {
  const bool is_send = direction == Direction::kSend;
  const auto start = [this, direction, peer, tag, is_send](Tensors& own) -> WorkPtr {
    if (!has_transfers_of(own)) {
      ::c10d::Backend& other = delegate_for(name(direction));
      return is_send ? other.send(own, peer, tag) : other.recv(own, peer, tag);
    }
    const at::Tensor& tensor = only_tensor(name(direction), own);
    return communicator_->transfer(direction, tensor, peer, tag, Launch::kAsync);
  };
  Block* const block = this->block();
  const bool is_on_gpu = !tensors.empty() && tensors[0].is_cuda();
  if (block == nullptr || !is_on_gpu || !has_transfers_of(tensors)) {
    return call([&] { return start(tensors); });
  }
  const int source = is_send ? getRank() : peer;
  const int destination = is_send ? peer : getRank();
  const auto num_earlier = std::count_if(
      block->transfers.begin(), block->transfers.end(), [&](const Block::Transfer& earlier) {
        return earlier.peer == peer && earlier.turn.is_send == is_send;
      });
  Block::Transfer waiting{
      .turn = schedule::turn_of_transfer(getSize(), source, destination, num_earlier, is_send),
      .peer = peer,
      .start = [start, own = tensors]() mutable { return start(own); },
      .work = c10::make_intrusive<PromisedWork>(getRank(), op_type_of(direction))};
  block->transfers.push_back(std::move(waiting));
  return block->transfers.back().work;
}

void ProcessGroupRota::start_transfers(Block& block) {
  std::vector<Block::Transfer> transfers = std::exchange(block.transfers, {});
  std::sort(transfers.begin(), transfers.end(),
            [](const Block::Transfer& a, const Block::Transfer& b) { return a.turn < b.turn; });
  for (Block::Transfer& transfer : transfers) transfer.work->keep(call_in(block, transfer.start));
}

WorkPtr ProcessGroupRota::recvAnysource(Tensors& tensors, int tag) {
  return call([&]() -> WorkPtr {
    const at::Tensor& tensor = only_tensor("recv", tensors);
    if (tensor.is_cuda()) return delegate_for("recv").recvAnysource(tensors, tag);
    return communicator_->transfer(Direction::kRecv, tensor, kAnyRank, tag, Launch::kAsync);
  });
}

WorkPtr ProcessGroupRota::barrier(const ::c10d::BarrierOptions& opts) {
  return run([] { return Operations{{.kind = CollectiveKind::kBarrier}}; }, &Backend::barrier,
             opts);
}

void ProcessGroupRota::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool) {
  try {
    communicator_->run(
        Operation{.kind = CollectiveKind::kBarrier, .timeout = own_timeout(opts.timeout)},
        Launch::kBlocking);
  } catch (const PythonError& error) {
    const bool is_late = error.kind() == ErrorKind::kTimeout ||
                         error.kind() == ErrorKind::kTransport;  // a rank has not made the group
    if (!is_late) throw;
    throw PythonError(Error(
        error.kind(), join("Rank ", getRank(), " timed out in monitoredBarrier: ", error.what())));
  }
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupRota::split(
    const StorePtr& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  const auto own = std::ranges::find(ranks, getRank());
  if (own == ranks.end()) return {};
  // torch splits a group once for each device type of it.
  if (options && last_split_ && options->group_name == last_split_name_) {
    if (auto last = last_split_->lock()) return last;
  }
  OptionsPtr of_rota = c10::dynamic_intrusive_pointer_cast<BackendOptions>(options);
  of_rota = c10::make_intrusive<BackendOptions>(of_rota ? *of_rota : *options_);
  if (options) of_rota->timeout = options->timeout;
  // As in rota.backend: the engine between hosts connects all ranks together.
  of_rota->connects_at_first_use = !communicator_->spans_hosts(ranks);
  of_rota->check_interrupt = options_->check_interrupt;
  of_rota->check_peers = options_->check_peers;
  of_rota->why_ended = [ranks,
                        parent = std::weak_ptr<TensorCommunicator>(communicator_)](int rank) {
    const auto communicator = parent.lock();
    return communicator ? communicator->why_ended(ranks[static_cast<size_t>(rank)]) : "";
  };
  of_rota->watch_block = options_->watch_block;
  const auto prefix = join("rota/split/", options ? options->group_name : "", "/");
  auto group = c10::make_intrusive<ProcessGroupRota>(
      c10::make_intrusive<::c10d::PrefixStore>(prefix, store),
      static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), std::move(of_rota),
      make_delegate_, make_window_, std::nullopt);
  if (options && !options->group_name.empty()) {
    last_split_name_ = options->group_name;
    last_split_.emplace(c10::intrusive_ptr<Backend>(group));
  }
  return group;
}

#if defined(C10D_BACKEND_HAS_RECONFIGURE)
::c10d::ReconfigureHandle ProcessGroupRota::get_reconfigure_handle() const {
  TORCH_CHECK_NOT_IMPLEMENTED(membership_, kFixedMembers);
  return membership_->handle();
}

WorkPtr ProcessGroupRota::reconfigure(const ::c10d::ReconfigureOptions& opts) {
  TORCH_CHECK_NOT_IMPLEMENTED(membership_, kFixedMembers);
  const auto called = HostWork::Clock::now();
  communicator_->check_not_inside("reconfigure");
  communicator_->abort("the members of this process group change");
  communicator_ = without_members();
  const auto* ordered = std::get_if<std::vector<std::string>>(&opts.handles);
  std::vector<std::string> handles;
  if (ordered != nullptr) {
    handles = *ordered;
  } else {
    const auto& all = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(all.begin(), all.end());
  }
  std::shared_ptr<TensorCommunicator> made;
  membership_->reconfigure(
      opts.uuid, handles, ordered != nullptr, opts.timeout,
      [&](const StorePtr& store, int rank, int world_size, std::function<void()> check_peers) {
        TensorCommunicatorOptions options = *options_;
        options.check_peers = std::move(check_peers);
        made = TensorCommunicator::make(store, rank, world_size,
                                        opts.timeout.value_or(options_->timeout), options);
        made->set_timeout(options_->timeout);
        store_ = store;
        rank_ = rank;
        size_ = world_size;
      });
  communicator_ = std::move(made);
  delegate_ = nullptr;
  num_windows_ = 0;
  num_calls_ = 0;
  last_split_.reset();
  return HostWork::completed(rank_, ::c10d::OpType::UNKNOWN, {}, called);
}
#endif

#if defined(C10D_BACKEND_HAS_WINDOW)
c10::intrusive_ptr<::c10d::Window> ProcessGroupRota::new_window(
    const std::optional<at::Tensor>& tensor) {
  const auto prefix = join("rota/new_window/", num_windows_++);
  auto store = c10::make_intrusive<::c10d::PrefixStore>(prefix, store_);
  int num_registered = 0;
  auto window = c10::make_intrusive<WindowRota>(
      [make = make_window_, store, num_registered, rank = getRank(),
       world_size = getSize()](const at::Tensor& registered) mutable {
        const auto own_store =
            c10::make_intrusive<::c10d::PrefixStore>(std::to_string(num_registered++), store);
        return make(registered, own_store, rank, world_size);
      });
  if (tensor) window->tensor_register(*tensor, /*owning=*/true);
  return window;
}
#endif

void ProcessGroupRota::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator_->set_timeout(timeout);
}

::c10d::ErrorType ProcessGroupRota::getError() {
  const auto failure = communicator_->failure();
  if (!failure) return ::c10d::ErrorType::SUCCESS;
  switch (*failure) {
    case ErrorKind::kTimeout:
      return ::c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerFailed:
      return ::c10d::ErrorType::REMOTE_ERROR;
    case ErrorKind::kNone:
    case ErrorKind::kInternal:
    case ErrorKind::kMismatch:
    case ErrorKind::kTransport:
    case ErrorKind::kValue:
    case ErrorKind::kType:
      return ::c10d::ErrorType::COMM_ERROR;
  }
  return ::c10d::ErrorType::COMM_ERROR;
}

at::Tensor ProcessGroupRota::allocateTensor(long num_elems, at::TensorOptions options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "rota.empty: a tensor on ", options.device(),
                    ", expected the CPU; make it with torch.empty");
  return with_python_errors(
      [&] { return make_heap_tensor(num_elems, options.dtype().toScalarType()); });
}

bool ProcessGroupRota::has_transfers_of(const Tensors& tensors) const {
  return tensors.empty() || !tensors[0].is_cuda() || communicator_->has_transfers();
}

void ProcessGroupRota::shutdown() {
  if (delegate_) delegate_->shutdown();
  communicator_->close();
}

void ProcessGroupRota::abort() {
  if (delegate_) delegate_->abort();
  communicator_->abort(join("rank ", getRank(), " aborted its process group"));
}

}  // namespace rota::c10d_backend
