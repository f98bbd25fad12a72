#include "core/plan.h"

#include <bit>
#include <cmath>

#include "base/error.h"
#include "cuda/sums.h"
#include "schedule/two_level.h"

namespace rota {
namespace {

[[noreturn]] void refuse(const Call& call, ErrorKind error, const std::string& what) {
  throw Error(error, join("rota.", call.kind_name(), ": ", what));
}

void check_op(const Call& call) {
  if (is_defined(call.op, call.dtype)) return;
  refuse(call, ErrorKind::kType,
         join(name(call.op), " is not defined for ", name(call.dtype),
              info(call.dtype).is_floating ? "; use an integer or bool tensor"
                                           : "; average as integers or floats"));
}

void check_wire(const Call& call) {
  const DType wire = call.wire.dtype;
  if (wire == call.dtype || (info(call.dtype).is_floating && info(wire).is_floating &&
                             info(wire).num_bytes <= info(call.dtype).num_bytes)) {
    return;
  }
  refuse(call, ErrorKind::kType,
         join("wire_dtype ", name(wire), " for a ", name(call.dtype),
              " tensor; expected a floating dtype that is not wider"));
}

void check_block_scaling(const Call& call) {
  if (!call.wire.is_block_scaled || has_block_scaling(call.wire.dtype)) return;
  refuse(call, ErrorKind::kValue,
         join("block_scaling with wire_dtype ", name(call.wire.dtype),
              ", which has float32's range; use it with float16 or float8"));
}

void check_factor(const Call& call, std::string_view what, float factor) {
  if (std::isnormal(factor) && factor > 0 && std::isnormal(1 / factor)) return;
  refuse(call, ErrorKind::kValue,
         join(what, " is ", factor, ", expected a positive number in float32's normal range"));
}

}  // namespace

Call Planner::all_reduce(DType dtype, uint64_t num_elems, const AllReduceOptions& options) const {
  const DType wire = options.wire.value_or(dtype);
  const DType accumulate = info(wire).accumulate;
  Call call{.kind = CollectiveKind::kAllReduce,
            .op = options.op,
            .dtype = dtype,
            .wire = {wire},
            .hop = options.hop.value_or(accumulate),
            .num_elems = num_elems,
            .pass = {.divisor = static_cast<float>(world_size_)}};
  check_op(call);
  check_wire(call);
  if (options.hop && gpu_) {
    refuse(call, ErrorKind::kValue,
           "hop_dtype is given; on GPUs partial sums travel in the accumulate dtype, leave it out");
  }
  if (options.hop && options.algorithm != schedule::Algorithm::kRing) {
    refuse(call, ErrorKind::kValue, "hop_dtype only has a meaning with algorithm='ring'");
  }
  if (call.hop != accumulate && call.hop != wire) {
    refuse(call, ErrorKind::kType,
           join("hop_dtype ", name(call.hop), "; expected ", name(accumulate),
                " (the accumulate dtype) or ", name(wire), " (the wire dtype)"));
  }
  call.order = sum_order(call, options.order, options.algorithm);
  choose_algorithm(call, options.algorithm);
  return call;
}

schedule::SumOrder Planner::sum_order(const Call& call, const OrderOptions& options,
                                      std::optional<schedule::Algorithm> requested) const {
  if (!options.is_tree && options.num_shards) {
    refuse(call, ErrorKind::kValue, "num_shards only has a meaning with order='tree'");
  }
  if (!options.is_tree && !options.group_size) return {};
  const std::string_view what = options.is_tree ? "order='tree'" : "group_size";
  if (options.is_tree && options.group_size) {
    refuse(call, ErrorKind::kValue, "order='tree' knows no group_size; leave one of them out");
  }
  const bool needs_tree = options.is_tree && info(call.wire.dtype).is_floating;
  if (needs_tree && gpu_ && world_size_ > cuda::kMostTreeRanks) {
    refuse(call, ErrorKind::kValue,
           join("order='tree' on GPUs is for up to ", cuda::kMostTreeRanks,
                " ranks, world_size is ", world_size_, "; use group_size, or CPU tensors"));
  }
  if (requested && is_ring(*requested)) {
    refuse(call, ErrorKind::kValue,
           join("algorithm='", name(*requested), "' adds ranks one after another and takes no ",
                what, "; use 'one_shot', 'two_shot' or 'auto'"));
  }
  if (options.is_tree) return {.num_shards = num_shards(call, options.num_shards)};
  return {.group_size = group_size(call, *options.group_size)};
}

// Returns 0 if groups make no difference.
int Planner::group_size(const Call& call, int64_t num_ranks) const {
  if (num_ranks < 1 || world_size_ % num_ranks != 0) {
    refuse(call, ErrorKind::kValue,
           join("group_size is ", num_ranks, ", expected a divisor of world_size ", world_size_));
  }
  return num_ranks == 1 || num_ranks == world_size_ ? 0 : static_cast<int>(num_ranks);
}

uint32_t Planner::num_shards(const Call& call, std::optional<int64_t> num_shards) const {
  const uint32_t fewest = std::bit_ceil(static_cast<uint32_t>(world_size_));
  if (!num_shards) return fewest;
  constexpr int64_t kMost = int64_t{1} << 31;
  if (*num_shards < fewest || *num_shards > kMost ||
      !std::has_single_bit(static_cast<uint64_t>(*num_shards))) {
    refuse(call, ErrorKind::kValue,
           join("num_shards is ", *num_shards, ", expected a power of two, at least ", fewest,
                " for world_size ", world_size_));
  }
  return static_cast<uint32_t>(*num_shards);
}

Call Planner::reduce_bucket(DType dtype, uint64_t num_elems, const BucketOptions& options) const {
  const WireFormat& wire = options.wire;
  Call call{.kind = CollectiveKind::kReduceBucket,
            .op = ReduceOp::kAvg,
            .dtype = dtype,
            .wire = wire,
            .hop = DType::kFloat32,
            .num_elems = num_elems,
            .pass = options.pass};
  if (!is_bucket_dtype(dtype) || !is_wire_dtype(wire.dtype)) {
    refuse(call, ErrorKind::kType,
           join("a bucket of ", name(dtype), " with wire_dtype ", name(wire.dtype),
                "; expected floats, and no float64 wire"));
  }
  check_block_scaling(call);
  check_factor(call, "contribution_factor", call.pass.contribution_factor);
  check_factor(call, "divisor", call.pass.divisor);
  check_factor(call, "result_factor", call.pass.result_factor);
  call.order = sum_order(call, options.order, options.algorithm);
  choose_algorithm(call, options.algorithm);
  return call;
}

Call Planner::collective(CollectiveKind kind, DType dtype, uint64_t num_elems, ReduceOp op,
                         int root, std::optional<WireFormat> wire,
                         const OrderOptions& order) const {
  const CollectiveRow& row = row_of(kind);
  Call call{
      .kind = kind, .dtype = dtype, .root = row.has_root() ? root : 0, .num_elems = num_elems};
  check_root(kind, root);
  if (row.reduces) {
    call.op = op;
    call.wire = wire.value_or(WireFormat{dtype});
    call.hop = info(call.wire.dtype).accumulate;
    call.pass.divisor = static_cast<float>(world_size_);
    check_op(call);
    check_wire(call);
    call.order = sum_order(call, order, std::nullopt);
  } else if (wire && *wire != WireFormat{dtype}) {
    call.wire = *wire;
    check_wire(call);
    check_block_scaling(call);
  }
  if (kind == CollectiveKind::kReduce) choose_algorithm(call, std::nullopt);
  return call;
}

void Planner::check_root(CollectiveKind kind, int root) const {
  if (!row_of(kind).has_root() || (root >= 0 && root < world_size_)) return;
  refuse({.kind = kind}, ErrorKind::kValue,
         join("root is ", root, ", expected a rank in [0, ", world_size_, ")"));
}

void Planner::choose_algorithm(Call& call, std::optional<schedule::Algorithm> requested) const {
  if (requested == schedule::Algorithm::kLowLatency && !gpu_) {
    refuse(call, ErrorKind::kValue,
           "algorithm='low_latency' is for CUDA tensors; for CPU tensors 'one_shot' is the fastest "
           "of short ones");
  }
  if (requested == schedule::Algorithm::kTwoLevel && gpu_) {
    refuse(call, ErrorKind::kValue,
           "algorithm='two_level' is for CPU tensors on several NUMA nodes; leave the algorithm to "
           "rota ('auto')");
  }
  if (world_size_ == 1) {
    call.algorithm = schedule::Algorithm::kOneShot;  // all give the same result: one rounding
  } else if (gpu_) {
    const uint64_t most_packet_bytes = call.wire.is_block_scaled ? 0 : gpu_->most_packet_bytes;
    call.algorithm = requested.value_or(schedule::select_on_gpu(
        gpu_->tuning, world_size_, call.wire.num_bytes(call.num_elems), most_packet_bytes));
  } else {
    if (requested == schedule::Algorithm::kTwoLevel) check_two_levels(call);
    call.algorithm = requested ? *requested : choose_on_cpu(call);
    if (call.algorithm == schedule::Algorithm::kTwoLevel) call.node_size = node_size_;
  }
}

schedule::Algorithm Planner::choose_on_cpu(const Call& call) const {
  const uint64_t num_bytes = call.wire.num_bytes(call.num_elems);
  if (num_bytes >= schedule::kMinTwoLevelBytes && allows_two_levels(call) &&
      schedule::crosses_less(node_size_, info(call.wire.dtype).num_bytes,
                             info(call.hop).num_bytes)) {
    return schedule::Algorithm::kTwoLevel;
  }
  return schedule::select(world_size_, num_bytes);
}

// Integers have the same sum in any order.
bool Planner::allows_two_levels(const Call& call) const {
  return node_size_ != 0 && (!info(call.wire.dtype).is_floating ||
                             schedule::has_blocks(call.order, world_size_, node_size_));
}

void Planner::check_two_levels(const Call& call) const {
  if (node_size_ == 0) {
    refuse(
        call, ErrorKind::kValue,
        "algorithm='two_level' needs as many consecutive ranks on each of several NUMA nodes of "
        "one host (Communicator.numa_nodes); bind the ranks to nodes, set ROTA_NUMA_NODE, or use "
        "'two_shot'");
  }
  if (allows_two_levels(call)) return;
  const schedule::SumOrder& order = call.order;
  const bool is_tree = schedule::has_blocks({.num_shards = 1}, world_size_, node_size_);
  refuse(call, ErrorKind::kValue,
         join("algorithm='two_level' first adds the ", node_size_, " ranks of each NUMA node, ",
              order.num_shards != 0   ? std::string("which are no subtree of order='tree'")
              : order.group_size != 0 ? join("not groups of ", order.group_size)
                                      : std::string("not all ranks one after another"),
              "; pass group_size=", node_size_, is_tree ? " or order='tree'" : "",
              ", or use 'two_shot'"));
}

}  // namespace rota
