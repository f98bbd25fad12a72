#include "tensor/cuda/cuda_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "tensor/cuda/device_work.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/gpus.h"
#include "tensor/packed_operation.h"

namespace rota::tensors {
namespace {

// How long kernels of a destroyed communicator keep waiting for other ranks.
constexpr auto kPatienceOfDropped = std::chrono::seconds(10);

transport::DeviceGeometry make_geometry(int world_size, const schedule::Tuning& tuning) {
  const int num_channels =
      tuning.num_channels == 0 ? cuda::num_multiprocessors() : tuning.num_channels;
  return cuda::geometry_of(world_size, num_channels, tuning);
}

uint64_t num_tiles_of(const Call& call) { return schedule::ceil_div(call.num_elems, kTileElems); }

cuda::BucketArgs args_of(const Call& call, std::byte* wire, void* data) {
  return bucket_of(data, call.num_elems, wire, call.pass.contribution_factor,
                   call.pass.result_factor);
}

}  // namespace

CudaCollectives::CudaCollectives(std::shared_ptr<Communicator> communicator,
                                 const c10::intrusive_ptr<::c10d::Store>& store, at::Device device,
                                 CallerThread thread)
    : communicator_(std::move(communicator)),
      device_(device),
      guard_(at::kCUDA),
      stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      receive_stream_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      tuning_(agree_on_tuning(*communicator_, thread)),
      geometry_(make_geometry(communicator_->world_size(), tuning_)),
      regions_(join_gpus(*communicator_, store, device, tuning_, geometry_, thread)),
      planner_(communicator_->world_size(),
               Planner::Gpu{.tuning = tuning_,
                            .most_packet_bytes = cuda::most_packet_bytes(geometry_)}) {
  // The last that can fail: a rank that goes through the host's memory alone would leave the
  // kernels of the others waiting.
  agree(*communicator_, thread, [&] {
    executor_.emplace(cuda::Executor::Options{.rank = communicator_->rank(),
                                              .tuning = tuning_,
                                              .geometry = geometry_,
                                              .regions = regions_->by_rank(),
                                              .own_regions = regions_->own(),
                                              .stall_after = kStallAfter,
                                              .timeout = communicator_->timeout()});
    monitor_.emplace(
        *communicator_,
        DeviceMonitor::Kernels{.failure = [this] { return executor_->failure(); },
                               .take_stall = [this] { return executor_->take_stall(); },
                               .set_num_left = [this](int n) { executor_->set_num_left(n); },
                               .abort = [this] { executor_->abort(); },
                               .have_ended = [this] { return have_kernels_ended(); }});
  });
}

CudaCollectives::~CudaCollectives() {
  // The last collectives' results may still be wanted, so wait for them, but not for ranks that
  // never come.
  try {
    auto waiting_since = std::chrono::steady_clock::now();
    finish([&] {
      const auto now = std::chrono::steady_clock::now();
      if (!monitor_->is_stalled()) waiting_since = now;
      if (now - waiting_since < kPatienceOfDropped) return;
      communicator_->abort(join("rank ", communicator_->rank(),
                                " dropped its communicator with work pending on its GPU"));
      executor_->abort();
    });
  } catch (const std::exception&) {
    // The driver is gone, and with it all that ran.
  }
  // The monitor and the executor are destroyed before the regions, when nothing of this rank runs
  // any more.
}

bool CudaCollectives::have_kernels_ended() const {
  try {
    const c10::DeviceGuard on_device(device_);
    return executor_->is_idle();
  } catch (const std::exception&) {
    return true;  // The driver is gone, and with it all that ran.
  }
}

void CudaCollectives::finish(const std::function<void()>& check_interrupt) {
  const c10::DeviceGuard on_device(device_);
  while (!executor_->is_idle()) {
    check_interrupt();
    std::this_thread::sleep_for(kFinishPoll);
  }
}

// Only if a kernel has given up: the group may also have failed when all results were there. The
// monitor says why, a few ms later.
void CudaCollectives::check_results(const std::function<void()>& check_interrupt) {
  finish(check_interrupt);
  while (executor_->failure()) {
    communicator_->check_usable("check_results");
    check_interrupt();
    std::this_thread::sleep_for(kFinishPoll);
  }
}

WorkRef CudaCollectives::launch(Launch mode, const c10::Stream& stream, ::c10d::OpType op_type,
                                const char* title, at::TensorList tensors,
                                c10::function_ref<void()> body) {
  // A profiler range for the launch, on the caller's thread; profilers show the kernels below it.
  RECORD_USER_SCOPE(title);
  const c10::DeviceGuard on_device(device_);
  if (mode == Launch::kBlocking) {
    body();
    return {};
  }
  hand_over(tensors, stream);
  const c10::StreamGuard on_stream(stream);
  body();
  return c10::make_intrusive<DeviceWork>(communicator_, op_type, title, tensors.vec(), stream);
}

void CudaCollectives::run(const Call& call, uint64_t fingerprint, void* input, void* output) {
  cuda::LaunchRequest request = cuda::request_for(call, communicator_->world_size());
  request.input = {input};
  request.output = {output};
  request.fingerprint = fingerprint;
  run(request);
}

void CudaCollectives::run(const cuda::LaunchRequest& request) {
  executor_->run(executor_->plan(request), current_stream(device_));
}

// Only a reduce_scatter may have parts of different lengths and no transfers to move them.
bool CudaCollectives::supports(const Operation& operation) const {
  if (operation.kind != CollectiveKind::kReduceScatter) return true;
  if (operation.inputs.size() == 1 && operation.input_splits.empty()) return true;
  return plan(operation, planner_, communicator_->rank(), device_).uneven == 0;
}

WorkRef CudaCollectives::run(OperationList operations, Launch mode) {
  std::vector<Call> calls;
  std::vector<at::Tensor> tensors;
  for (const Operation& operation : operations) {
    const std::string_view kind = name(operation.kind);
    const Call call = plan(operation, planner_, communicator_->rank(), device_);
    if (call.uneven != 0 && !is_of_transfers(call)) {
      throw Error(ErrorKind::kValue, join("rota.", kind,
                                          ": parts of different lengths are not "
                                          "supported on GPUs; pad them, or use NCCL"));
    }
    calls.push_back(call);
    for (const at::TensorList side : {operation.outputs, operation.inputs}) {
      tensors.insert(tensors.end(), side.begin(), side.end());
    }
  }
  if (operations.empty()) return {};
  check_apart(operations);
  const CollectiveKind kind = operations[0].kind;
  return launch(mode, op_type_of(kind), row_of(kind).title.data(), tensors, [&] {
    for (size_t i = 0; i < operations.size(); ++i) run_planned(operations[i], calls[i]);
  });
}

void CudaCollectives::run_planned(const Operation& operation, const Call& call) {
  if (is_of_transfers(call)) return run_transfers(operation, call);
  if (row_of(call.kind).is_in_place) return run_in_place(operation, call);
  if (call.kind == CollectiveKind::kAllGather) return run_all_gather(operation, call);
  run_reduce_scatter(operation, call);
}

// Ranks other than the root put the sum of a reduce aside.
void CudaCollectives::run_in_place(const Operation& operation, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  const CollectiveRow& row = row_of(call.kind);
  if (!row.reduces && communicator_->world_size() == 1) return;
  const at::NoGradGuard no_grad;
  const int rank = communicator_->rank();
  const bool contributes = is_among(row.contributors, rank, call.root);
  const bool receives = is_among(row.receivers, rank, call.root);
  const bool is_aside = row.reduces && !receives;
  const at::Tensor tensor = is_aside ? operation.outputs[0].clone() : operation.outputs[0];
  const Packed packed(tensor, contributes ? Packed::Content::kRead : Packed::Content::kOverwritten,
                      operation.premul_factor);
  if (cuda::is_packed(call)) {
    run_packed(call, fingerprint, packed.data(), nullptr, nullptr);
  } else {
    run(call, fingerprint, packed.data(), packed.data());
  }
  if (receives) packed.unpack();
}

WorkRef CudaCollectives::reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                       Launch mode) {
  check_tensor(tensors.bucket, "reduce_bucket", device_);
  const Call call = plan(tensors, planner_, options);
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
  const BucketMemory memory(device_, num_tiles_of(call), call.wire);
  launch_pack(call, memory, data, residual);
  run(call, fingerprint, memory.wire, memory.wire);
  launch_unpack(call, memory, memory.wire, data, stats != nullptr ? stats : memory.stats);
}

void CudaCollectives::launch_pack(const Call& call, const BucketMemory& memory, void* data,
                                  float* residual) {
  cuda::launch_pack({.bucket = args_of(call, memory.wire, data),
                     .residual = residual,
                     .rounding = cuda::rounding_of(call, communicator_->rank()),
                     .words = memory.words},
                    call.dtype, call.wire, current_stream(device_));
}

void CudaCollectives::launch_unpack(const Call& call, const BucketMemory& memory, std::byte* wire,
                                    void* data, double* stats) {
  cuda::launch_unpack({.bucket = args_of(call, wire, data),
                       .squares = memory.squares,
                       .stats = stats,
                       .words = memory.words},
                      call.dtype, call.wire, current_stream(device_));
}

// The kernel fills one contiguous tensor.
void CudaCollectives::run_all_gather(const Operation& operation, const Call& call) {
  if (call.encodes_parts()) return run_encoded_all_gather(operation, call);
  const int world_size = communicator_->world_size();
  if (world_size == 1) return run_transfers(operation, call);
  const uint64_t fingerprint = communicator_->post_launch(call);
  const at::NoGradGuard no_grad;
  const at::Tensor& input = operation.inputs[0];
  const at::TensorList outputs = operation.outputs;
  if (outputs.size() == 1) {
    const PackedOperation packed(operation, communicator_->rank(), world_size);
    const cpu::Buffers buffers = packed.buffers();
    run(call, fingerprint, buffers.inputs->data, buffers.outputs->data);
    return packed.unpack();
  }
  const Packed packed_input(input, Packed::Content::kRead);
  const at::Tensor gathered = at::empty({world_size, input.numel()}, input.options());
  run(call, fingerprint, packed_input.data(), gathered.data_ptr());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor part = gathered.select(0, static_cast<int64_t>(i)).view(outputs[i].sizes());
    as_copyable(outputs[i]).copy_(as_copyable(part));
  }
}

// Each rank's wire buffer is in whole tiles, padded to whole accesses of unpack.
void CudaCollectives::run_encoded_all_gather(const Operation& operation, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  if (call.num_elems == 0) return;
  const auto world_size = static_cast<size_t>(communicator_->world_size());
  const BucketMemory own(device_, num_tiles_of(call), call.wire);
  const Packed packed_input(operation.inputs[0], Packed::Content::kRead);
  launch_pack(call, own, packed_input.data(), nullptr);

  const size_t part_bytes =
      schedule::ceil_div(own.num_wire_bytes, cuda::kAccessBytes) * cuda::kAccessBytes;
  at::Tensor gathered = own.whole;
  if (world_size > 1) {
    gathered = at::empty({static_cast<int64_t>(world_size * part_bytes)}, own.whole.options());
    // The dtype is a float, so that NaN takes the place of what does not arrive.
    const Call bytes{.kind = call.kind, .dtype = DType::kFloat8E5M2, .num_elems = part_bytes};
    run(bytes, fingerprint, own.wire, gathered.data_ptr());
  }
  std::vector<Packed> outputs;
  for (const at::Tensor& output : operation.outputs) {
    outputs.emplace_back(output, Packed::Content::kOverwritten);
  }
  const bool is_one_output = outputs.size() < world_size;
  for (size_t rank = 0; rank < world_size; ++rank) {
    auto* data = static_cast<std::byte*>(outputs[is_one_output ? 0 : rank].data());
    if (is_one_output) data += rank * call.num_bytes();
    auto* wire = static_cast<std::byte*>(gathered.data_ptr()) + rank * part_bytes;
    launch_unpack(call, own, wire, data, own.stats);
  }
  for (const Packed& output : outputs) output.unpack();
}

void CudaCollectives::run_reduce_scatter(const Operation& operation, const Call& call) {
  const uint64_t fingerprint = communicator_->post_launch(call);
  const at::NoGradGuard no_grad;
  const at::Tensor& output = operation.outputs[0];
  at::Tensor input = operation.inputs[0];
  if (operation.inputs.size() > 1) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : operation.inputs) parts.push_back(part.reshape({-1}));
    input = at::cat(parts);
  }
  const bool is_packed = cuda::is_packed(call);
  if (communicator_->world_size() == 1 && !is_packed) {
    output.copy_(input.reshape(output.sizes()).mul(operation.premul_factor.value_or(1)));
    return;
  }
  Operation of_one_input = operation;
  of_one_input.inputs = input;
  const PackedOperation packed(of_one_input, communicator_->rank(), communicator_->world_size());
  const cpu::Buffers buffers = packed.buffers();
  if (is_packed) {
    run_packed_reduce_scatter(call, fingerprint, buffers.inputs->data, buffers.outputs->data);
  } else {
    run(call, fingerprint, buffers.inputs->data, buffers.outputs->data);
  }
  packed.unpack();
}

// Without scales the wire buffer is the input, element by element, and only its end is padded.
void CudaCollectives::run_packed_reduce_scatter(const Call& call, uint64_t fingerprint, void* input,
                                                void* output) {
  if (call.num_elems == 0) return;
  const int world_size = communicator_->world_size();
  Call whole = call;
  whole.num_elems *= static_cast<uint64_t>(world_size);
  const BucketMemory memory(device_, num_tiles_of(whole), call.wire);
  launch_pack(whole, memory, input, nullptr);
  if (world_size == 1) return launch_unpack(call, memory, memory.wire, output, memory.stats);
  const size_t part_bytes = call.wire.payload_bytes(num_tiles_of(call) * kTileElems);
  const at::Tensor sums = at::empty({static_cast<int64_t>(part_bytes)}, memory.whole.options());
  auto* wire = static_cast<std::byte*>(sums.data_ptr());
  run(call, fingerprint, memory.wire, wire);
  launch_unpack(call, memory, wire, output, memory.stats);
}

bool is_capturing(at::Device device) { return cuda::is_capturing(current_stream(device)); }

std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread) {
  const c10::DeviceGuard on_device(device);
  return std::make_unique<CudaCollectives>(std::move(communicator), store, device, thread);
}

}  // namespace rota::tensors
