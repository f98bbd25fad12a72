#include "tensor/cuda/device_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>

#include "base/random_bits.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/device_work.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

constexpr auto kFinishPoll = std::chrono::microseconds(100);
// How long kernels of a communicator that is dropped go on waiting for other ranks.
constexpr auto kPatienceOfDropped = std::chrono::seconds(10);

transport::DeviceGeometry make_geometry(int world_size, const schedule::Tuning& tuning) {
  const int num_channels =
      tuning.num_channels == 0 ? cuda::num_multiprocessors() : tuning.num_channels;
  return cuda::geometry_of(world_size, num_channels, tuning);
}

// Of what does not go through the host's memory.
[[noreturn]] void refuse_untrusted(std::string_view call, const std::string& finding,
                                   std::string_view instead) {
  throw Error(ErrorKind::kTransport,
              join("rota.", call, ": not available on this GPU, whose self-test found ", finding,
                   "; ", instead));
}

}  // namespace

DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Communicator> communicator,
                                       const c10::intrusive_ptr<::c10d::Store>& store,
                                       at::Device device, CallerThread thread,
                                       std::unique_ptr<DeviceCollectives> through_host)
    : communicator_(std::move(communicator)),
      device_(device),
      guard_(at::kCUDA),
      stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      receive_stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      tuning_(agree_on_tuning(*communicator_, thread)),
      geometry_(make_geometry(communicator_->world_size(), tuning_)),
      gpus_(join_gpus(*communicator_, store, device, tuning_, geometry_, thread)),
      through_host_(std::move(through_host)),
      executor_({.rank = communicator_->rank(),
                 .tuning = tuning_,
                 .geometry = geometry_,
                 .regions = gpus_.regions->by_rank(),
                 .stall_after = kStallAfter,
                 .timeout = communicator_->timeout()}),
      monitor_(*communicator_, {.failure = [this] { return executor_.failure(); },
                                .take_stall = [this] { return executor_.take_stall(); },
                                .abort = [this] { executor_.abort(); }}) {}

DeviceCommunicator::~DeviceCommunicator() {
  // Results of the last collectives may still be wanted; ranks that do not come are not.
  try {
    auto waiting_since = std::chrono::steady_clock::now();
    finish([&] {
      const auto now = std::chrono::steady_clock::now();
      if (!monitor_.is_stalled()) waiting_since = now;
      if (now - waiting_since < kPatienceOfDropped) return;
      communicator_->abort(join("rank ", communicator_->rank(),
                                " dropped its communicator with work pending on its GPU"));
      executor_.abort();
    });
  } catch (const std::exception&) {
    // The driver is gone, with all that ran.
  }
  // The monitor and the executor go before the regions, and nothing of this rank runs then.
}

void DeviceCommunicator::finish(const std::function<void()>& check_interrupt) {
  const c10::DeviceGuard on_device(device_);
  while (!executor_.is_idle()) {
    check_interrupt();
    std::this_thread::sleep_for(kFinishPoll);
  }
}

template <typename Body>
WorkRef DeviceCommunicator::launch(Launch mode, const c10::Stream& stream, ::c10d::OpType op_type,
                                   const char* title, at::TensorList tensors, const Body& body) {
  // The range of the launch, on the caller's thread; profilers show the kernels below it.
  RECORD_USER_SCOPE(title);
  const c10::DeviceGuard on_device(device_);
  if (mode == Launch::kBlocking) {
    body();
    return {};
  }
  c10::Event ready(device_.type());
  ready.record(guard_.getStream(device_));
  ready.block(stream);
  const c10::StreamGuard on_stream(stream);
  body();
  for (const at::Tensor& tensor : tensors) {
    // Not to be given away by the allocator while this stream works on it.
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  return c10::make_intrusive<DeviceWork>(communicator_, op_type, title, tensors.vec(), stream);
}

std::optional<schedule::Algorithm> DeviceCommunicator::choose(
    std::optional<schedule::Algorithm> requested, const WireFormat& wire, uint64_t num_elems,
    std::string_view collective) const {
  using schedule::Algorithm;
  const auto why_not = [&](Algorithm algorithm) {
    return gpus_.unusable.why_not(cuda::kernel_for(algorithm), wire);
  };
  if (communicator_->world_size() == 1) {
    if (why_not(Algorithm::kOneShot)) return std::nullopt;
    return Algorithm::kOneShot;
  }
  if (requested) {
    const auto finding = why_not(*requested);
    if (!finding) return requested;
    throw Error(ErrorKind::kValue, join("rota.", collective, ": algorithm='", name(*requested),
                                        "' is not used on this GPU, whose self-test found ",
                                        *finding, "; leave the algorithm to rota (\"auto\")"));
  }
  const uint64_t most_packet_bytes = wire.is_block_scaled ? 0 : cuda::most_packet_bytes(geometry_);
  const Algorithm fastest = schedule::select_on_gpu(tuning_, communicator_->world_size(),
                                                    wire.num_bytes(num_elems), most_packet_bytes);
  for (const Algorithm algorithm :
       {fastest, Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kOrderedRing}) {
    if (!why_not(algorithm)) return algorithm;
  }
  return std::nullopt;
}

bool DeviceCommunicator::has_format(DType dtype, const WireFormat& wire) const {
  return wire == WireFormat{dtype} || !gpus_.unusable.why_not_bucket(dtype, wire);
}

void DeviceCommunicator::run(const cuda::LaunchRequest& request) {
  executor_.run(executor_.plan(request), current_stream(device_));
}

WorkRef DeviceCommunicator::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                       Launch mode) {
  std::vector<cpu::AllReduceArgs> plans;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce", device_);
    AllReduceRequest request = request_of(tensor, options);
    if (request.hop) {
      throw Error(ErrorKind::kValue,
                  "rota.all_reduce: hop_dtype is given; on GPUs partial sums travel in the "
                  "accumulate dtype, leave it out");
    }
    const WireFormat wire{request.wire.value_or(request.dtype)};
    const auto algorithm = choose(request.algorithm, wire, request.num_elems, "all_reduce");
    if (!algorithm || !has_format(request.dtype, wire)) {
      return through_host_->all_reduce(tensors, options, mode);
    }
    request.algorithm = algorithm;
    plans.push_back(communicator_->plan(request));
  }
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:all_reduce", tensors, [&] {
    for (size_t i = 0; i < tensors.size(); ++i) run_all_reduce(tensors[i], plans[i]);
  });
}

void DeviceCommunicator::run_all_reduce(const at::Tensor& tensor, const cpu::AllReduceArgs& plan) {
  const uint64_t fingerprint = communicator_->post_launch(describe(plan));
  const Packed packed(tensor, Packed::Content::kRead);
  if (plan.wire == WireFormat{plan.dtype}) {
    run({.kernel = cuda::kernel_for(plan.algorithm),
         .input = {packed.data()},
         .output = {packed.data()},
         .num_elems = plan.num_elems,
         .format = plan.wire,
         .op = plan.op,
         .divisor = static_cast<double>(communicator_->world_size()),
         .fingerprint = fingerprint});
  } else {
    cpu::AllReduceArgs args = plan;
    args.data = packed.data();
    run_in_wire_format(args, {}, communicator_->world_size(), nullptr, fingerprint);
  }
  packed.unpack();
}

WorkRef DeviceCommunicator::reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                                          Launch mode) {
  check_tensor(bucket, "reduce_bucket", device_);
  check_bucket(bucket, options);
  BucketRequest request = request_of(bucket, options);
  // A bucket is packed and unpacked whatever it travels as.
  const bool is_packed = !gpus_.unusable.why_not_bucket(request.dtype, request.wire);
  const auto algorithm =
      choose(request.algorithm, request.wire, request.num_elems, "reduce_bucket");
  if (!algorithm || !is_packed) return through_host_->reduce_bucket(bucket, options, mode);
  request.algorithm = algorithm;
  const cpu::AllReduceArgs plan = communicator_->plan(request, options.pass);
  std::vector<at::Tensor> tensors{bucket, options.stats};
  if (options.residual) tensors.push_back(*options.residual);
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:reduce_bucket", tensors,
                [&] { run_reduce_bucket(bucket, options, plan); });
}

void DeviceCommunicator::run_reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                                           const cpu::AllReduceArgs& plan) {
  const Packed packed(bucket, Packed::Content::kRead);
  cpu::BucketPass pass = options.pass;
  if (options.residual) pass.residual = options.residual->data_ptr<float>();
  cpu::AllReduceArgs args = plan;
  args.data = packed.data();
  args.pass = &pass;
  const uint64_t fingerprint = communicator_->post_launch(describe(args));
  run_in_wire_format(args, pass, pass.divisor, options.stats.data_ptr<double>(), fingerprint);
  packed.unpack();
}

void DeviceCommunicator::run_in_wire_format(const cpu::AllReduceArgs& args,
                                            const cpu::BucketPass& pass, double divisor,
                                            double* stats, uint64_t fingerprint) {
  const uint64_t num_tiles = schedule::ceil_div(args.num_elems, kTileElems);
  const BucketMemory memory(device_, num_tiles, args.wire);
  const cuda::Stream stream = current_stream(device_);
  const cuda::BucketArgs bucket{.contiguous = {static_cast<std::byte*>(args.data), args.num_elems},
                                .num_tiles = num_tiles,
                                .wire = memory.wire,
                                .contribution_factor = pass.contribution_factor,
                                .result_factor = pass.result_factor};
  const bool is_stochastic = pass.stochastic_seed.has_value();
  const auto rounding = [&](int rounding_stream) -> cuda::Rounding {
    return {.is_stochastic = is_stochastic,
            .seed = pass.stochastic_seed.value_or(0),
            .stream = static_cast<uint64_t>(rounding_stream)};
  };
  cuda::launch_pack({.bucket = bucket,
                     .residual = pass.residual,
                     .rounding = rounding(communicator_->rank()),
                     .words = memory.words},
                    args.dtype, args.wire, stream);
  run({.kernel = cuda::kernel_for(args.algorithm),
       .input = {memory.wire},
       .output = {memory.wire},
       .num_elems = bucket.num_elems(),
       .format = args.wire,
       .op = args.op,
       .divisor = divisor,
       .is_bucket = true,
       .rounding = rounding(kResultStream),
       .fingerprint = fingerprint});
  cuda::launch_unpack({.bucket = bucket,
                       .squares = memory.squares,
                       .stats = stats != nullptr ? stats : memory.stats,
                       .words = memory.words},
                      args.dtype, args.wire, stream);
}

WorkRef DeviceCommunicator::broadcast(at::TensorList tensors, int root, Launch mode) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "broadcast", device_);
    movable_dtype(tensor, "broadcast");
  }
  if (gpus_.unusable.why_not(cuda::Kernel::kBroadcast, cuda::kBytes)) {
    return through_host_->broadcast(tensors, root, mode);
  }
  return launch(mode, ::c10d::OpType::BROADCAST, "rota:broadcast", tensors, [&] {
    for (const at::Tensor& tensor : tensors) {
      const uint64_t fingerprint =
          communicator_->post_launch({.kind = CollectiveKind::kBroadcast,
                                      .dtype = movable_dtype(tensor, "broadcast"),
                                      .root = root,
                                      .num_elems = static_cast<uint64_t>(tensor.numel())});
      if (communicator_->world_size() == 1) continue;
      const Packed packed(tensor, root == communicator_->rank() ? Packed::Content::kRead
                                                                : Packed::Content::kOverwritten);
      run({.kernel = cuda::Kernel::kBroadcast,
           .input = {packed.data()},
           .output = {packed.data()},
           .num_elems = num_bytes(tensor),
           .format = cuda::kBytes,
           .source = root,
           .fingerprint = fingerprint});
      if (root != communicator_->rank()) packed.unpack();
    }
  });
}

WorkRef DeviceCommunicator::all_gather(const std::vector<AllGatherTensors>& gathers, Launch mode) {
  std::vector<at::Tensor> tensors;
  for (const AllGatherTensors& gather : gathers) {
    check_gather(gather, communicator_->world_size());
    check_tensor(gather.input, "all_gather", device_);
    tensors.insert(tensors.end(), gather.outputs.begin(), gather.outputs.end());
    tensors.push_back(gather.input);
  }
  return launch(mode, ::c10d::OpType::ALLGATHER, "rota:all_gather", tensors, [&] {
    for (const AllGatherTensors& gather : gathers) run_all_gather(gather);
  });
}

// The kernel fills one tensor; outputs that lie in one as they should are filled at once.
void DeviceCommunicator::run_all_gather(const AllGatherTensors& gather) {
  const uint64_t fingerprint =
      communicator_->post_launch({.kind = CollectiveKind::kAllGather,
                                  .dtype = movable_dtype(gather.input, "all_gather"),
                                  .num_elems = static_cast<uint64_t>(gather.input.numel())});
  const at::NoGradGuard no_grad;
  if (communicator_->world_size() == 1) {
    gather.outputs[0].copy_(gather.input);
    return;
  }
  const Packed input(gather.input, Packed::Content::kRead);
  const uint64_t shard_bytes = num_bytes(gather.input);
  auto* whole = static_cast<std::byte*>(gather.outputs[0].data_ptr());
  bool is_whole = true;
  for (size_t i = 0; i < gather.outputs.size(); ++i) {
    is_whole &= gather.outputs[i].is_contiguous() &&
                gather.outputs[i].data_ptr() == whole + i * shard_bytes;
  }
  at::Tensor gathered;
  if (!is_whole) {
    const auto num_ranks = static_cast<int64_t>(gather.outputs.size());
    gathered = at::empty({num_ranks, gather.input.numel()}, gather.input.options());
    whole = static_cast<std::byte*>(gathered.data_ptr());
  }
  run({.kernel = cuda::Kernel::kAllGather,
       .input = {input.data()},
       .output = {whole},
       .num_elems = gather.outputs.size() * shard_bytes,
       .format = cuda::kBytes,
       .fingerprint = fingerprint});
  if (is_whole) return;
  for (size_t i = 0; i < gather.outputs.size(); ++i) {
    const at::Tensor& output = gather.outputs[i];
    output.copy_(gathered.select(0, static_cast<int64_t>(i)).view(output.sizes()));
  }
}

bool DeviceCommunicator::has_reduce_scatter(at::ScalarType dtype) const {
  const DType known = reducible_dtype(dtype, "the tensor's dtype");
  return !gpus_.unusable.why_not(cuda::Kernel::kReduceScatter, {known});
}

WorkRef DeviceCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           ReduceOp op, Launch mode) {
  for (const at::Tensor& tensor : {output, input}) {
    check_tensor(tensor, "reduce_scatter", device_);
    if (!tensor.is_contiguous()) {
      throw Error(ErrorKind::kValue,
                  "rota.reduce_scatter: a tensor is not contiguous; call contiguous() first");
    }
  }
  const int world_size = communicator_->world_size();
  if (input.numel() != output.numel() * world_size || input.scalar_type() != output.scalar_type()) {
    throw Error(ErrorKind::kValue,
                join("rota.reduce_scatter: the input has ", input.numel(), " elements of ",
                     c10::toString(input.scalar_type()), ", the output ", output.numel(), " of ",
                     c10::toString(output.scalar_type()), "; expected ", world_size,
                     " times as many of one dtype"));
  }
  const DType dtype = reducible_dtype(input.scalar_type(), "the tensor's dtype");
  if (const auto finding = gpus_.unusable.why_not(cuda::Kernel::kReduceScatter, {dtype})) {
    refuse_untrusted("reduce_scatter", *finding, "all_reduce and take a part, or use NCCL");
  }
  const auto num_elems = static_cast<uint64_t>(input.numel());
  communicator_->plan({.num_elems = num_elems, .dtype = dtype, .op = op});  // refuses
  return launch(mode, ::c10d::OpType::REDUCE_SCATTER, "rota:reduce_scatter", {output, input}, [&] {
    const uint64_t fingerprint = communicator_->post_launch({.kind = CollectiveKind::kReduceScatter,
                                                             .op = op,
                                                             .dtype = dtype,
                                                             .wire = {dtype},
                                                             .num_elems = num_elems});
    if (world_size == 1) {
      output.copy_(input.view(output.sizes()));
      return;
    }
    run({.kernel = cuda::Kernel::kReduceScatter,
         .input = {input.data_ptr()},
         .output = {output.data_ptr()},
         .num_elems = num_elems,
         .format = {dtype},
         .op = op,
         .divisor = static_cast<double>(world_size),
         .fingerprint = fingerprint});
  });
}

bool DeviceCommunicator::has_transfers() const {
  return !gpus_.unusable.why_not(cuda::Kernel::kTransfer, cuda::kBytes);
}

WorkRef DeviceCommunicator::send(const at::Tensor& tensor, int peer, Launch mode) {
  return transfer(tensor, communicator_->rank(), peer, mode);
}

WorkRef DeviceCommunicator::recv(const at::Tensor& tensor, int peer, Launch mode) {
  return transfer(tensor, peer, communicator_->rank(), mode);
}

WorkRef DeviceCommunicator::transfer(const at::Tensor& tensor, int source, int destination,
                                     Launch mode) {
  const int rank = communicator_->rank();
  const bool is_send = source == rank;
  const int peer = is_send ? destination : source;
  check_tensor(tensor, "send_recv", device_);
  if (peer < 0 || peer >= communicator_->world_size() || peer == rank) {
    throw Error(ErrorKind::kValue,
                join("rota.", is_send ? "send" : "recv", ": the other rank is ", peer,
                     ", expected one in [0, ", communicator_->world_size(), ") other than ", rank));
  }
  if (const auto finding = gpus_.unusable.why_not(cuda::Kernel::kTransfer, cuda::kBytes)) {
    refuse_untrusted(is_send ? "send" : "recv", *finding, "use NCCL");
  }
  const Descriptor descriptor{.kind = CollectiveKind::kSendRecv,
                              .dtype = movable_dtype(tensor, "send_recv"),
                              .num_elems = static_cast<uint64_t>(tensor.numel())};
  return launch(mode, is_send ? stream_ : receive_stream_,
                is_send ? ::c10d::OpType::SEND : ::c10d::OpType::RECV,
                is_send ? "rota:send" : "rota:recv", tensor, [&] {
                  const uint64_t fingerprint =
                      communicator_->post_transfer(descriptor, source, destination);
                  const Packed packed(
                      tensor, is_send ? Packed::Content::kRead : Packed::Content::kOverwritten);
                  run({.kernel = cuda::Kernel::kTransfer,
                       .input = {packed.data()},
                       .output = {packed.data()},
                       .num_elems = num_bytes(tensor),
                       .format = cuda::kBytes,
                       .source = source,
                       .destination = destination,
                       .fingerprint = fingerprint});
                  if (!is_send) packed.unpack();
                });
}

bool is_capturing(at::Device device) { return cuda::is_capturing(current_stream(device)); }

std::unique_ptr<DeviceCollectives> connect_devices(
    std::shared_ptr<Communicator> communicator, const c10::intrusive_ptr<::c10d::Store>& store,
    at::Device device, CallerThread thread, std::unique_ptr<DeviceCollectives> through_host) {
  const c10::DeviceGuard on_device(device);
  return std::make_unique<DeviceCommunicator>(std::move(communicator), store, device, thread,
                                              std::move(through_host));
}

}  // namespace rota::tensors
