// How a call becomes a launch: its request, and how that cuts tensors into shards, chunks and
// blocks.
#include "check.h"
#include "core/plan.h"
#include "launch_requests.h"
#include "schedule/chunk.h"

namespace rota::test {
namespace {

using cuda::Kernel;
using cuda::LaunchRequest;

constexpr Kernel kKernels[] = {Kernel::kLowLatency,    Kernel::kOneShot,   Kernel::kTwoShot,
                               Kernel::kOrderedRing,   Kernel::kRing,      Kernel::kHierarchical,
                               Kernel::kReduceScatter, Kernel::kAllGather, Kernel::kBroadcast,
                               Kernel::kTransfer};

void calls_are_asked_of_their_kernels() {
  constexpr int kWorldSize = 4;
  const Planner planner(kWorldSize);
  const auto request_for = [](const Call& call) { return cuda::request_for(call, kWorldSize); };
  const schedule::Algorithm two_shot = schedule::Algorithm::kTwoShot;

  const LaunchRequest plain =
      request_for(planner.all_reduce(DType::kFloat32, 1000, {.algorithm = two_shot}));
  check(plain.kernel == Kernel::kTwoShot && !plain.is_bucket, "all_reduce");
  check_equal(plain.num_elems, 1000, "elements of all_reduce");
  check_equal(plain.divisor, 4.0, "the divisor of all_reduce");

  const LaunchRequest narrow = request_for(
      planner.all_reduce(DType::kFloat32, 1000, {.algorithm = two_shot, .wire = DType::kFloat16}));
  check(narrow.format == WireFormat{DType::kFloat16} && narrow.is_bucket, "a narrow all_reduce");
  check_equal(narrow.num_elems, 2 * kTileElems, "elements of a narrow all_reduce");

  const LaunchRequest bucket = request_for(planner.reduce_bucket(
      DType::kFloat32, 1000,
      {.wire = {DType::kFloat16, true}, .pass = {.divisor = 3, .stochastic_seed = 7}}));
  check(bucket.format == WireFormat{DType::kFloat16, true} && bucket.is_bucket, "a bucket");
  check(bucket.op == ReduceOp::kAvg && bucket.divisor == 3, "the average of a bucket");
  check(bucket.rounding.is_stochastic && bucket.rounding.seed == 7, "the rounding of a bucket");

  const LaunchRequest broadcast = request_for(planner.collective(
      CollectiveKind::kBroadcast, DType::kFloat32, 10, ReduceOp::kSum, /*root=*/3));
  check(broadcast.kernel == Kernel::kBroadcast && broadcast.source == 3, "broadcast");
  check_equal(broadcast.num_elems, 40, "bytes of broadcast");
  const LaunchRequest gather =
      request_for(planner.collective(CollectiveKind::kAllGather, DType::kFloat32, 10));
  check(gather.kernel == Kernel::kAllGather && gather.format == cuda::kBytes, "all_gather");
  check_equal(gather.num_elems, 160, "bytes of all_gather");
  const LaunchRequest scatter = request_for(
      planner.collective(CollectiveKind::kReduceScatter, DType::kFloat16, 10, ReduceOp::kMax));
  check(scatter.kernel == Kernel::kReduceScatter && scatter.op == ReduceOp::kMax, "reduce_scatter");
  check_equal(scatter.num_elems, 40, "elements of reduce_scatter");

  const Call rounded =
      planner.collective(CollectiveKind::kReduceScatter, DType::kFloat32, 10, ReduceOp::kAvg,
                         /*root=*/0, WireFormat{DType::kBFloat16});
  const LaunchRequest narrow_scatter = request_for(rounded);
  check(cuda::is_packed(rounded) && !narrow_scatter.is_bucket, "equal shards of packed elements");
  check(narrow_scatter.format == WireFormat{DType::kBFloat16}, "format of a narrow reduce_scatter");
  check_equal(narrow_scatter.num_elems, 40, "elements of a narrow reduce_scatter");
  const WireFormat blocks{DType::kFloat8E4M3, true};
  const auto gather_in = [&](std::optional<WireFormat> wire, DType dtype) {
    return planner.collective(CollectiveKind::kAllGather, dtype, 10, ReduceOp::kSum, 0, wire);
  };
  check(cuda::is_packed(gather_in(blocks, DType::kFloat32)), "a narrow all_gather");
  check(!cuda::is_packed(gather_in(WireFormat{DType::kFloat32}, DType::kFloat32)), "its own dtype");
  expect_error(ErrorKind::kType, [&] { gather_in(blocks, DType::kUInt8); });
  expect_error(ErrorKind::kValue,
               [&] { gather_in(WireFormat{DType::kBFloat16, true}, DType::kFloat32); });
  expect_error(ErrorKind::kValue, [&] { request_for({.kind = CollectiveKind::kBarrier}); });
}

// A tree that groups give runs in the kernel for groups, as does any tree of integers.
void orders_pick_the_kernel_that_adds_in_them() {
  const auto request_for = [](int world_size, DType dtype) {
    const Planner planner(world_size);
    return cuda::request_for(
        planner.all_reduce(
            dtype, 1000, {.algorithm = schedule::Algorithm::kTwoShot, .order = {.is_tree = true}}),
        world_size);
  };
  const auto check_groups = [&](int world_size, int group_size) {
    const LaunchRequest request = request_for(world_size, DType::kFloat16);
    check(request.sums == cuda::Sums::kInGroups, join("groups of ", world_size, " ranks"));
    check_equal(request.group_size, group_size, join("group size of ", world_size, " ranks"));
  };
  check_groups(2, 2);
  check_groups(3, 3);
  check_groups(4, 2);
  check_groups(6, 3);
  for (const int world_size : {5, 7, 8, 16}) {
    const std::string what = join(world_size, " ranks");
    check(request_for(world_size, DType::kFloat16).sums == cuda::Sums::kInTree, what);
    check(request_for(world_size, DType::kInt8).sums == cuda::Sums::kInGroups, what);
  }
  for (const Kernel kernel : {Kernel::kRing, Kernel::kOrderedRing, Kernel::kHierarchical}) {
    LaunchRequest request = good_request(kernel);
    expect_error(ErrorKind::kValue,
                 [&] { cuda::set_order(request, {.num_shards = 2}, /*world_size=*/2); },
                 {"does not add along a tree"});
  }
}

void nothing_to_do_launches_nothing() {
  for (const Kernel kernel : kKernels) {
    LaunchRequest request = good_request(kernel);
    request.num_elems = 0;
    request.input = request.output = {};
    check_equal(plan_launch(request, good_peers()).num_blocks, 0, cuda::name(kernel));
  }
}

// For four ranks, in two groups if the kernel has groups. Shards are whole granules long, but equal
// shards are as long as the caller's tensors.
uint64_t shard_elems_of(Kernel kernel, uint64_t num_elems) {
  if (kernel == Kernel::kReduceScatter || kernel == Kernel::kAllGather) return num_elems / 4;
  const bool has_shards = kernel == Kernel::kTwoShot || kernel == Kernel::kRing;
  const uint64_t num_shards = kernel == Kernel::kHierarchical ? 2 : has_shards ? 4 : 1;
  return schedule::ceil_div(num_elems, num_shards * kGranuleElems) * kGranuleElems;
}

// Every chunk fits the slot or packet buffer that it travels in, and chunks cover every element.
void chunks_fit_and_cover() {
  const cuda::Peers peers = good_peers();
  for (const Kernel kernel : kKernels) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kUInt8}) {
      for (const uint64_t num_elems : {4, 60, 64, 1000, 1536, 4096}) {
        LaunchRequest request = good_request(kernel);
        request.format = {dtype};
        request.num_elems = num_elems;
        if (kernel == Kernel::kHierarchical) request.group_size = 2;
        if (kernel == Kernel::kReduceScatter || kernel == Kernel::kAllGather) {
          request.output = {g_tensor + (1 << 15)};
        }
        const size_t elem_bytes = info(dtype).num_bytes;
        if (kernel == Kernel::kLowLatency && num_elems * elem_bytes > 3 * 2048) continue;
        const cuda::LaunchPlan plan = plan_launch(request, peers);
        const std::string what = join(cuda::name(kernel), " of ", num_elems, " ", name(dtype));
        size_t room = peers.geometry.slot_bytes;
        size_t widest = elem_bytes;
        if (kernel == Kernel::kLowLatency) room = peers.geometry.packet_bytes / 2;
        if (kernel == Kernel::kOrderedRing) room /= 2;
        if (kernel == Kernel::kOrderedRing || kernel == Kernel::kRing ||
            kernel == Kernel::kHierarchical) {
          widest = info(info(dtype).accumulate).num_bytes;
        }
        check(plan.args.chunk_elems * widest <= room, what + ": a chunk does not fit");
        check_equal(plan.args.chunk_elems % kGranuleElems, 0, what);
        check(plan.num_blocks >= 1 && plan.num_blocks <= 3, what + ": blocks");
        const uint64_t longest = std::min(plan.args.shard_elems, plan.args.num_elems);
        check(plan.args.num_chunks * plan.args.chunk_elems >= longest &&
                  (plan.args.num_chunks - 1) * plan.args.chunk_elems < longest,
              what + ": chunks of the longest shard");
        check_equal(plan.args.shard_elems, shard_elems_of(kernel, num_elems), what + ": shards");
      }
    }
  }
}

void averages_by_powers_of_two_multiply() {
  LaunchRequest request = good_request(Kernel::kOneShot);
  request.op = ReduceOp::kAvg;
  request.divisor = 4;
  check_equal(plan_launch(request, good_peers()).args.reciprocal, 0.25, "reciprocal");
  request.divisor = 3;
  check_equal(plan_launch(request, good_peers()).args.reciprocal, 0.0, "reciprocal");
}

// Tensors of local ranks that need not wait are cut into chunks of one length, however few channels
// there are.
void blocks_that_wait_for_nobody_outnumber_channels() {
  cuda::MappedTensors tensors{};
  LaunchRequest request = mapped_request(tensors);
  request.num_elems = 100'000;
  const cuda::LaunchPlan local = plan_launch(request, local_peers());
  check(!local.waits, "waits");
  check_equal(local.args.chunk_elems, kTuning.free_chunk_bytes / 4, "chunk");
  check_equal(local.args.shard_elems, 25'024, "shards of whole granules");
  check_equal(local.args.num_chunks, 9, "chunks of a shard");
  check_equal(local.num_blocks, 9, "blocks of a shard");
  check_equal(local.num_threads, kTuning.free_threads, "threads");

  request.input = request.output = {tensors.of[1]};
  const cuda::LaunchPlan apart = plan_launch(request, good_peers());
  check(apart.waits, "waits");
  check_equal(apart.num_blocks, 3, "a block for each channel");
  check_equal(apart.num_threads, cuda::kThreadsPerBlock, "threads");
  for (const Kernel kernel : kKernels) {
    request = good_request(kernel);
    request.input.fill(g_tensor);
    request.output.fill(g_tensor + (1 << 15));
    check(plan_launch(request, local_peers()).waits, cuda::name(kernel));
  }
}

// A rank's additions, by rank: the first four levels of the tree are in one word.
void trees_are_counted_for_kernels() {
  LaunchRequest request = good_request(Kernel::kOneShot);
  check_equal(plan_launch(request, good_peers()).args.tree.of_ranks, 0, "no tree");
  request.sums = cuda::Sums::kInTree;
  const cuda::LaunchPlan plan = plan_launch(request, good_peers());
  for (const auto& [rank, num] : {std::pair{0, 0u}, {1, 1u}, {2, 0u}, {3, 2u}}) {
    check_equal(plan.args.tree.after(rank), num, join("additions after rank ", rank));
  }
  check_equal(plan.num_threads, cuda::kTreeThreads, "threads");
}

// What a launch that gives up may fill with NaN.
void results_that_are_floats_are_known() {
  using cuda::OutputFloats;
  const auto check_floats = [](Kernel kernel, const WireFormat& format, OutputFloats expected,
                               int source, const char* what) {
    LaunchRequest request = good_request(kernel);
    request.format = format;
    request.moves_floats = kernel == Kernel::kBroadcast;
    if (kernel == Kernel::kReduceScatter) request.output = {g_tensor + format.num_bytes(250)};
    const cuda::CollectiveArgs args = plan_launch(request, good_peers()).args;
    check(args.output_floats == expected && args.source == source, what);
  };
  check_floats(Kernel::kTwoShot, {DType::kBFloat16}, OutputFloats::kAllShards, -1, "floats");
  check_floats(Kernel::kTwoShot, {DType::kInt32}, OutputFloats::kNone, -1, "integers");
  check_floats(Kernel::kReduceScatter, {DType::kFloat32}, OutputFloats::kOneShard, -1, "one shard");
  check_floats(Kernel::kBroadcast, cuda::kBytes, OutputFloats::kAllShards, 1,
               "what a root has stays");
  const auto copy_of = [](DType dtype) {
    return cuda::request_for({.kind = CollectiveKind::kAllGather, .dtype = dtype, .num_elems = 8},
                             4);
  };
  check(copy_of(DType::kComplex64).moves_floats, "complex numbers");
  check(!copy_of(DType::kInt64).moves_floats, "bytes of integers");
}

const CaseTable kCases{
    {"launch_output_floats", results_that_are_floats_are_known},
    {"launch_request", calls_are_asked_of_their_kernels},
    {"launch_orders", orders_pick_the_kernel_that_adds_in_them},
    {"launch_trees", trees_are_counted_for_kernels},
    {"launch_nothing", nothing_to_do_launches_nothing},
    {"launch_chunks", chunks_fit_and_cover},
    {"launch_free_blocks", blocks_that_wait_for_nobody_outnumber_channels},
    {"launch_averages", averages_by_powers_of_two_multiply},
};

}  // namespace
}  // namespace rota::test
