#include "tensor/cuda/level_sums.h"

namespace rota::tensors {
namespace {

constexpr size_t kMessageGranuleBytes = 16;  // kernels want messages to start so

// As hosts/reducers.h: buckets, and what travels in scaled blocks, are summed as float32.
bool is_bucket(const Call& call) {
  return call.kind == CollectiveKind::kReduceBucket || call.wire.is_block_scaled;
}
DType accumulate_of(const Call& call) {
  return is_bucket(call) ? DType::kFloat32 : info(call.dtype).accumulate;
}

}  // namespace

bool sums_on_gpus(const Call& call, const schedule::Hosts& hosts) {
  if (call.uneven != 0 || call.pass.stochastic_seed) return false;
  if (call.order.num_shards != 0) {
    for (int host = 0; host < hosts.num_hosts(); ++host) {
      if (hosts.local_size(host) > cuda::kMostTreeRanks) return false;
    }
  }
  const DType accumulate = accumulate_of(call);
  const bool is_widened = accumulate != call.dtype;
  const bool is_narrowed = call.wire != WireFormat{accumulate};
  if ((is_widened || is_bucket(call)) && !is_bucket_dtype(call.dtype)) return false;
  if (is_bucket(call)) return true;
  // pack rounds float64 by way of float32.
  return !is_narrowed || (is_wire_dtype(call.wire.dtype) && is_bucket_dtype(accumulate) &&
                          (accumulate == DType::kFloat32 || call.wire.dtype == DType::kFloat32));
}

LevelSums::LevelSums(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                     at::ScalarType type)
    : gpus_(gpus),
      call_(call),
      orders_(orders),
      accumulate_(accumulate_of(call)),
      type_(accumulate_ == call.dtype ? type : at::kFloat),
      factor_(call.kind == CollectiveKind::kReduceBucket ? call.pass.contribution_factor : 1),
      result_factor_(call.kind == CollectiveKind::kReduceBucket ? call.pass.result_factor : 1) {}

bool LevelSums::is_direct() const {
  return !is_bucket(call_) && call_.wire == WireFormat{call_.dtype};
}

ReduceOp LevelSums::partial_op() const { return hosts::partial_op(call_.op); }

size_t LevelSums::message_bytes(uint64_t num_elems) const {
  return schedule::ceil_div(call_.wire.num_bytes(in_tiles(num_elems)), kMessageGranuleBytes) *
         kMessageGranuleBytes;
}

void LevelSums::contribute(const void* data, uint64_t num_elems, const at::Tensor& partials) const {
  if (is_plain()) {
    gpus_.copy(partials.data_ptr(), data, num_elems * partial_bytes());
  } else if (num_elems > 0) {
    gpus_.pack(bucket_of(data, num_elems, partials.data_ptr(), factor_, 1), call_.dtype,
               {accumulate_});
  }
}

void LevelSums::encode(const void* partials, uint64_t num_elems, std::byte* message,
                       float* residual) const {
  gpus_.pack(bucket_of(partials, num_elems, message, 1, result_factor_), accumulate_, call_.wire,
             residual);
}

void LevelSums::sum(const at::Tensor& messages, const RankOfEachHost& senders,
                    uint64_t num_elems) const {
  auto* first = static_cast<std::byte*>(messages.data_ptr());
  cuda::MappedTensors mapped{};
  cuda::LaunchRequest request{.kernel = cuda::Kernel::kTwoShotInPlace,
                              .num_elems = in_tiles(num_elems),
                              .format = call_.wire,
                              .op = call_.op,
                              .divisor = call_.pass.divisor,
                              .is_bucket = true,
                              .tensors = &mapped};
  const int num_hosts = gpus_.hosts().num_hosts();
  for (int host = 0; host < num_hosts; ++host) {
    request.input[host] = request.output[host] = mapped.of[host] =
        first + senders.position_of(host) * message_bytes(num_elems);
  }
  cuda::set_order(request, orders_.hosts, num_hosts);
  gpus_.sums().run(request);
}

void LevelSums::decode(const BucketMemory& memory, std::byte* wire, void* data, uint64_t num_elems,
                       double* stats) const {
  const auto words =
      reinterpret_cast<std::byte*>(memory.words) - static_cast<std::byte*>(memory.whole.data_ptr());
  memory.whole.narrow(0, words, sizeof(cuda::UnpackWords)).zero_();
  cuda::launch_unpack({.bucket = bucket_of(data, num_elems, wire, 1, result_factor_),
                       .squares = memory.squares,
                       .stats = stats != nullptr ? stats : memory.stats,
                       .words = memory.words},
                      call_.dtype, call_.wire, current_stream(gpus_.device()));
}

}  // namespace rota::tensors
