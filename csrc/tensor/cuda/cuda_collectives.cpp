#include "tensor/cuda/cuda_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>

#include "tensor/connect_gpus.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/device_work.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

constexpr auto kFinishPoll = std::chrono::microseconds(100);
// How long kernels of a destroyed communicator keep waiting for other ranks.
constexpr auto kPatienceOfDropped = std::chrono::seconds(10);

transport::DeviceGeometry make_geometry(int world_size, const schedule::Tuning& tuning) {
  const int num_channels =
      tuning.num_channels == 0 ? cuda::num_multiprocessors() : tuning.num_channels;
  return cuda::geometry_of(world_size, num_channels, tuning);
}

// For calls that cannot fall back to the host's memory.
[[noreturn]] void refuse_untrusted(std::string_view call, const std::string& finding,
                                   std::string_view instead) {
  throw Error(ErrorKind::kTransport,
              join("rota.", call, ": not available on this GPU, whose self-test found ", finding,
                   "; ", instead));
}

}  // namespace

CudaCollectives::CudaCollectives(std::shared_ptr<Communicator> communicator,
                                 const c10::intrusive_ptr<::c10d::Store>& store, at::Device device,
                                 CallerThread thread, std::unique_ptr<Collectives> staging)
    : communicator_(std::move(communicator)),
      device_(device),
      guard_(at::kCUDA),
      stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      receive_stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      tuning_(agree_on_tuning(*communicator_, thread)),
      geometry_(make_geometry(communicator_->world_size(), tuning_)),
      gpus_(join_gpus(*communicator_, store, device, tuning_, geometry_, thread)),
      planner_(communicator_->world_size(),
               Planner::Gpu{.tuning = tuning_,
                            .most_packet_bytes = cuda::most_packet_bytes(geometry_),
                            .why_not =
                                [this](schedule::Algorithm algorithm, const WireFormat& wire) {
                                  return gpus_.unusable.why_not(cuda::kernel_for(algorithm), wire);
                                }}),
      staging_(std::move(staging)),
      executor_({.rank = communicator_->rank(),
                 .tuning = tuning_,
                 .geometry = geometry_,
                 .regions = gpus_.regions->by_rank(),
                 .stall_after = kStallAfter,
                 .timeout = communicator_->timeout()}),
      monitor_(*communicator_, {.failure = [this] { return executor_.failure(); },
                                .take_stall = [this] { return executor_.take_stall(); },
                                .abort = [this] { executor_.abort(); }}) {}

CudaCollectives::~CudaCollectives() {
  // The last collectives' results may still be wanted, so wait for them, but not for ranks that
  // never come.
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
    // The driver is gone, and with it all that ran.
  }
  // The monitor and the executor are destroyed before the regions, when nothing of this rank runs
  // any more.
}

void CudaCollectives::finish(const std::function<void()>& check_interrupt) {
  const c10::DeviceGuard on_device(device_);
  while (!executor_.is_idle()) {
    check_interrupt();
    std::this_thread::sleep_for(kFinishPoll);
  }
}

template <typename Body>
WorkRef CudaCollectives::launch(Launch mode, const c10::Stream& stream, ::c10d::OpType op_type,
                                const char* title, at::TensorList tensors, const Body& body) {
  // A profiler range for the launch, on the caller's thread; profilers show the kernels below it.
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
    // Keeps the allocator from reusing the memory while this stream works on it.
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  return c10::make_intrusive<DeviceWork>(communicator_, op_type, title, tensors.vec(), stream);
}

std::optional<std::string> CudaCollectives::why_not(const Call& call) const {
  const cuda::LaunchRequest request = cuda::request_for(call, communicator_->world_size());
  const auto finding = gpus_.unusable.why_not(request.kernel, request.format);
  if (finding || !cuda::is_packed(call)) return finding;
  return gpus_.unusable.why_not_bucket(call.dtype, call.wire);
}

void CudaCollectives::run(const Call& call, uint64_t fingerprint, void* input, void* output) {
  cuda::LaunchRequest request = cuda::request_for(call, communicator_->world_size());
  request.input = {input};
  request.output = {output};
  request.fingerprint = fingerprint;
  run(request);
}

void CudaCollectives::run(const cuda::LaunchRequest& request) {
  executor_.run(executor_.plan(request), current_stream(device_));
}

WorkRef CudaCollectives::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                    Launch mode) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce", device_);
    const DType dtype = reducible_dtype(tensor.scalar_type(), "the tensor's dtype");
    calls.push_back(planner_.all_reduce(dtype, num_elems(tensor), options));
    if (why_not(calls.back())) return staging_->all_reduce(tensors, options, mode);
  }
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:all_reduce", tensors, [&] {
    for (size_t i = 0; i < tensors.size(); ++i) run_all_reduce(tensors[i], calls[i]);
  });
}

void CudaCollectives::run_all_reduce(const at::Tensor& tensor, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  const Packed packed(tensor, Packed::Content::kRead);
  if (cuda::is_packed(call)) {
    run_packed(call, fingerprint, packed.data(), nullptr, nullptr);
  } else {
    run(call, fingerprint, packed.data(), packed.data());
  }
  packed.unpack();
}

WorkRef CudaCollectives::reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                       Launch mode) {
  check_tensor(tensors.bucket, "reduce_bucket", device_);
  check_bucket(tensors);
  const Call call =
      planner_.reduce_bucket(bucket_dtype(tensors.bucket), num_elems(tensors.bucket), options);
  if (why_not(call)) return staging_->reduce_bucket(tensors, options, mode);
  std::vector<at::Tensor> used{tensors.bucket, tensors.stats};
  if (tensors.residual) used.push_back(*tensors.residual);
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:reduce_bucket", used,
                [&] { run_reduce_bucket(tensors, call); });
}

void CudaCollectives::run_reduce_bucket(const BucketTensors& tensors, const Call& call) {
  const Packed packed(tensors.bucket, Packed::Content::kRead);
  const uint64_t fingerprint = communicator_->post_launch(call);
  run_packed(call, fingerprint, packed.data(),
             tensors.residual ? tensors.residual->data_ptr<float>() : nullptr,
             tensors.stats.data_ptr<double>());
  packed.unpack();
}

void CudaCollectives::run_packed(const Call& call, uint64_t fingerprint, void* data,
                                 float* residual, double* stats) {
  const uint64_t num_tiles = schedule::ceil_div(call.num_elems, kTileElems);
  const BucketMemory memory(device_, num_tiles, call.wire);
  const cuda::Stream stream = current_stream(device_);
  const cuda::BucketArgs bucket{.contiguous = {static_cast<std::byte*>(data), call.num_elems},
                                .num_tiles = num_tiles,
                                .wire = memory.wire,
                                .contribution_factor = call.pass.contribution_factor,
                                .result_factor = call.pass.result_factor};
  cuda::launch_pack({.bucket = bucket,
                     .residual = residual,
                     .rounding = cuda::rounding_of(call, communicator_->rank()),
                     .words = memory.words},
                    call.dtype, call.wire, stream);
  run(call, fingerprint, memory.wire, memory.wire);
  cuda::launch_unpack({.bucket = bucket,
                       .squares = memory.squares,
                       .stats = stats != nullptr ? stats : memory.stats,
                       .words = memory.words},
                      call.dtype, call.wire, stream);
}

WorkRef CudaCollectives::broadcast(at::TensorList tensors, int root, Launch mode) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "broadcast", device_);
    calls.push_back(
        planner_.broadcast(movable_dtype(tensor, "broadcast"), num_elems(tensor), root));
    if (why_not(calls.back())) return staging_->broadcast(tensors, root, mode);
  }
  return launch(mode, ::c10d::OpType::BROADCAST, "rota:broadcast", tensors, [&] {
    for (size_t i = 0; i < tensors.size(); ++i) run_broadcast(tensors[i], calls[i]);
  });
}

void CudaCollectives::run_broadcast(const at::Tensor& tensor, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  if (communicator_->world_size() == 1) return;
  const bool is_root = call.root == communicator_->rank();
  const Packed packed(tensor, is_root ? Packed::Content::kRead : Packed::Content::kOverwritten);
  run(call, fingerprint, packed.data(), packed.data());
  if (!is_root) packed.unpack();
}

WorkRef CudaCollectives::all_gather(std::vector<AllGatherTensors> gathers, Launch mode) {
  std::vector<Call> calls;
  std::vector<at::Tensor> tensors;
  for (const AllGatherTensors& gather : gathers) {
    check_gather(gather, communicator_->world_size());
    check_tensor(gather.input, "all_gather", device_);
    calls.push_back(
        planner_.all_gather(movable_dtype(gather.input, "all_gather"), num_elems(gather.input)));
    tensors.insert(tensors.end(), gather.outputs.begin(), gather.outputs.end());
    tensors.push_back(gather.input);
  }
  return launch(mode, ::c10d::OpType::ALLGATHER, "rota:all_gather", tensors, [&] {
    for (size_t i = 0; i < gathers.size(); ++i) run_all_gather(gathers[i], calls[i]);
  });
}

// The kernel fills one tensor. Outputs that are consecutive parts of one tensor are filled
// directly.
void CudaCollectives::run_all_gather(const AllGatherTensors& gather, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  const at::NoGradGuard no_grad;
  if (communicator_->world_size() == 1) {
    gather.outputs[0].copy_(gather.input);
    return;
  }
  const Packed input(gather.input, Packed::Content::kRead);
  const uint64_t shard_bytes = call.num_bytes();
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
  run(call, fingerprint, input.data(), whole);
  if (is_whole) return;
  for (size_t i = 0; i < gather.outputs.size(); ++i) {
    const at::Tensor& output = gather.outputs[i];
    output.copy_(gathered.select(0, static_cast<int64_t>(i)).view(output.sizes()));
  }
}

bool CudaCollectives::has_reduce_scatter(at::ScalarType dtype) const {
  const DType known = reducible_dtype(dtype, "the tensor's dtype");
  return !gpus_.unusable.why_not(cuda::Kernel::kReduceScatter, {known});
}

WorkRef CudaCollectives::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
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
  const Call call = planner_.reduce_scatter(dtype, num_elems(input), op);
  if (const auto finding = why_not(call)) {
    refuse_untrusted("reduce_scatter", *finding, "all_reduce and take a part, or use NCCL");
  }
  return launch(mode, ::c10d::OpType::REDUCE_SCATTER, "rota:reduce_scatter", {output, input}, [&] {
    const uint64_t fingerprint = communicator_->post_launch(call);
    if (world_size == 1) {
      output.copy_(input.view(output.sizes()));
    } else {
      run(call, fingerprint, input.data_ptr(), output.data_ptr());
    }
  });
}

bool CudaCollectives::has_transfers() const {
  return !gpus_.unusable.why_not(cuda::Kernel::kTransfer, cuda::kBytes);
}

WorkRef CudaCollectives::send(const at::Tensor& tensor, int peer, int64_t, Launch mode) {
  return transfer(tensor, communicator_->rank(), peer, mode);
}

WorkRef CudaCollectives::recv(const at::Tensor& tensor, int peer, int64_t, Launch mode) {
  return transfer(tensor, peer, communicator_->rank(), mode);
}

WorkRef CudaCollectives::transfer(const at::Tensor& tensor, int source, int destination,
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
  const Call call{.kind = CollectiveKind::kSendRecv,
                  .dtype = movable_dtype(tensor, "send_recv"),
                  .num_elems = num_elems(tensor)};
  if (const auto finding = why_not(call)) {
    refuse_untrusted(is_send ? "send" : "recv", *finding, "use NCCL");
  }
  const auto body = [&] {
    cuda::LaunchRequest request = cuda::request_for(call, communicator_->world_size());
    request.source = source;
    request.destination = destination;
    request.fingerprint = communicator_->post_transfer(call, source, destination);
    const Packed packed(tensor, is_send ? Packed::Content::kRead : Packed::Content::kOverwritten);
    request.input = request.output = {packed.data()};
    run(request);
    if (!is_send) packed.unpack();
  };
  return launch(mode, is_send ? stream_ : receive_stream_,
                is_send ? ::c10d::OpType::SEND : ::c10d::OpType::RECV,
                is_send ? "rota:send" : "rota:recv", tensor, body);
}

bool is_capturing(at::Device device) { return cuda::is_capturing(current_stream(device)); }

std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread,
                                          std::unique_ptr<Collectives> staging) {
  const c10::DeviceGuard on_device(device);
  return std::make_unique<CudaCollectives>(std::move(communicator), store, device, thread,
                                           std::move(staging));
}

}  // namespace rota::tensors
