// Which launches are refused, with which messages, and how the others cut tensors.
#include <array>
#include <cmath>

#include "check.h"
#include "core/plan.h"
#include "cuda/launch_plan.h"
#include "schedule/chunk.h"
#include "schedule/tuning.h"

namespace rota::test {
namespace {

using cuda::Kernel;
using cuda::LaunchRequest;

alignas(128) std::byte g_regions[4][128];
alignas(128) std::byte g_tensor[1 << 16];
uint32_t g_abort;
uint64_t g_failure;
uint64_t g_stall;

cuda::Peers good_peers() {
  cuda::Peers peers{
      .first_rank = 1,
      .geometry = {.world_size = 4, .num_channels = 3, .slot_bytes = 8192, .packet_bytes = 4096},
      .regions = {},
      .abort = &g_abort,
      .failure = &g_failure,
      .stall = &g_stall,
      .timeout_ns = 1};
  for (int rank = 0; rank < 4; ++rank) peers.regions[rank] = g_regions[rank];
  return peers;
}

LaunchRequest good_request(Kernel kernel) {
  return {.kernel = kernel,
          .input = {g_tensor},
          .output = {g_tensor},
          .num_elems = 1000,
          .source = 1,
          .destination = 2};
}

// Differs from every table entry.
constexpr schedule::Tuning kTuning{.max_low_latency_bytes = 4096,
                                   .max_one_shot_bytes = 16384,
                                   .num_channels = 3,
                                   .slot_bytes = 8192,
                                   .free_chunk_bytes = 12288,
                                   .free_threads = 96,
                                   .provenance = "of these cases"};

cuda::LaunchPlan plan_launch(const LaunchRequest& request, const cuda::Peers& peers) {
  return cuda::plan_launch(request, peers, kTuning);
}

void is_refused(const LaunchRequest& request, std::initializer_list<std::string_view> words,
                const cuda::Peers& peers = good_peers()) {
  const Error error = expect_error(ErrorKind::kValue, [&] { (void)plan_launch(request, peers); });
  for (const std::string_view word : words) check_contains(error.what(), word);
}

// ---- the world

void wrong_worlds_are_refused() {
  const LaunchRequest request = good_request(Kernel::kTwoShot);
  for (const int world_size : {-1, 0, 1, 65}) {
    cuda::Peers peers = good_peers();
    peers.geometry.world_size = world_size;
    is_refused(request, {"world_size", std::to_string(world_size), "2 to 64"}, peers);
  }
  cuda::Peers alone = good_peers();
  alone.first_rank = 0;
  alone.geometry.world_size = 1;
  plan_launch(good_request(Kernel::kOneShot), alone);
  for (const int rank : {-1, 4}) {
    cuda::Peers peers = good_peers();
    peers.first_rank = rank;
    is_refused(request, {"rank", std::to_string(rank), "0 to 3"}, peers);
  }
  for (const int num_local_ranks : {0, 4}) {
    cuda::Peers peers = good_peers();
    peers.num_local_ranks = num_local_ranks;
    is_refused(request, {"num_local_ranks", std::to_string(num_local_ranks), "1 to 3"}, peers);
  }
  cuda::Peers peers = good_peers();
  peers.geometry.num_channels = 0;
  is_refused(request, {"num_channels", "0", "1 or more"}, peers);
  peers = good_peers();
  peers.geometry.slot_bytes = 1000;
  is_refused(request, {"slot_bytes", "1000", "multiples of 128"}, peers);
  peers = good_peers();
  peers.geometry.packet_bytes = 100;
  is_refused(request, {"packet_bytes", "100", "multiples of 128"}, peers);
  peers = good_peers();
  peers.regions[2] = nullptr;
  is_refused(request, {"region of rank 2"}, peers);
  peers = good_peers();
  peers.regions[3] += 16;
  is_refused(request, {"region of rank 3", "multiple of 128"}, peers);
  peers = good_peers();
  peers.abort = nullptr;
  is_refused(request, {"abort word"}, peers);
  peers.abort = &g_abort;
  peers.stall = nullptr;
  is_refused(request, {"stalls"}, peers);
}

void slots_too_small_are_refused() {
  cuda::Peers peers = good_peers();
  peers.geometry.slot_bytes = 256;
  is_refused(good_request(Kernel::kOrderedRing),
             {"slot_bytes", "256", "ordered_ring", "64 elements"}, peers);
  LaunchRequest bucket = good_request(Kernel::kRing);
  bucket.format = {DType::kFloat16, true};
  bucket.is_bucket = true;
  peers.geometry.slot_bytes = 1920;  // less than a tile of float32
  is_refused(bucket, {"slot_bytes", "1920", "512 elements"}, peers);
}

// ---- the operation

void wrong_arithmetic_is_refused() {
  LaunchRequest request = good_request(Kernel::kTwoShot);
  request.format = {DType::kInt32};
  request.op = ReduceOp::kAvg;
  is_refused(request, {"two_shot", "avg", "int32"});
  request = good_request(Kernel::kTwoShot);
  request.op = ReduceOp::kBand;
  is_refused(request, {"band", "float32"});
  request.format = {DType::kComplex64};
  request.op = ReduceOp::kSum;
  is_refused(request, {"sum", "complex64"});
  request = good_request(Kernel::kTwoShot);
  request.format = {DType::kBFloat16, true};
  is_refused(request, {"bfloat16", "no block scaling"});
  request.format = {DType::kFloat16, true};
  request.op = ReduceOp::kMax;
  is_refused(request, {"max", "sum and avg"});
  for (const Kernel kernel : {Kernel::kLowLatency, Kernel::kReduceScatter}) {
    request = good_request(kernel);
    request.format = {DType::kFloat16, true};
    is_refused(request, {cuda::name(kernel), "block scaling", "one_shot or two_shot"});
  }
  for (const double divisor : {0.0, -2.0, std::nan(""), HUGE_VAL}) {
    request = good_request(Kernel::kTwoShot);
    request.op = ReduceOp::kAvg;
    request.divisor = divisor;
    is_refused(request, {"divisor", "positive finite"});
  }
  request = good_request(Kernel::kTwoShot);
  request.rounding.is_stochastic = true;
  request.format = {DType::kFloat64};
  is_refused(request, {"stochastic", "float64"});
}

void wrong_groups_are_refused() {
  for (const int group_size : {-1, 3, 8}) {
    LaunchRequest request = good_request(Kernel::kHierarchical);
    request.group_size = group_size;
    is_refused(request, {"group_size", std::to_string(group_size), "divisor of world_size 4"});
  }
  for (const Kernel kernel : {Kernel::kRing, Kernel::kOrderedRing}) {
    LaunchRequest request = good_request(kernel);
    request.group_size = 2;
    is_refused(request, {"group_size is 2", cuda::name(kernel), "hierarchical"});
  }
}

void wrong_ends_are_refused() {
  for (const int rank : {-1, 4}) {
    for (const Kernel kernel : {Kernel::kTransfer, Kernel::kBroadcast}) {
      LaunchRequest request = good_request(kernel);
      request.source = rank;
      is_refused(request, {cuda::name(kernel), std::to_string(rank), "0 to 3"});
    }
    LaunchRequest request = good_request(Kernel::kTransfer);
    request.destination = rank;
    is_refused(request, {"transfer", std::to_string(rank), "0 to 3"});
  }
  LaunchRequest request = good_request(Kernel::kTransfer);
  request.destination = 1;
  is_refused(request, {"from rank 1 to itself"});
  request.source = 2;
  request.destination = 3;
  is_refused(request, {"from rank 2 to rank 3", "rank 1", "no part"});
}

// ---- tensors

void wrong_tensors_are_refused() {
  LaunchRequest request = good_request(Kernel::kOneShot);
  request.input = {};
  is_refused(request, {"one_shot", "1000 elements", "no input"});
  request = good_request(Kernel::kTransfer);
  request.input = {};
  is_refused(request, {"transfer", "no input of rank 1"});
  std::swap(request.source, request.destination);
  request.output = {};
  is_refused(request, {"transfer", "no output of rank 1"});
  request = good_request(Kernel::kOneShot);
  request.output = {g_tensor + 3996};
  is_refused(request, {"overlap"});
  request.output = {g_tensor + 4000};
  (void)plan_launch(request, good_peers());
  request = good_request(Kernel::kTwoShot);
  request.format = {DType::kFloat16, true};
  request.input = request.output = {g_tensor + 8};
  is_refused(request, {"scaled blocks", "16 bytes"});
}

// All ranks of the world, on one GPU.
cuda::Peers local_peers() {
  cuda::Peers peers = good_peers();
  peers.first_rank = 0;
  peers.num_local_ranks = 4;
  return peers;
}

void tensors_of_every_local_rank_are_checked() {
  LaunchRequest request = good_request(Kernel::kTwoShot);
  for (size_t rank = 0; rank < 3; ++rank) {
    request.input[rank] = request.output[rank] = g_tensor + 4096 * rank;
  }
  is_refused(request, {"no input of rank 3"}, local_peers());
  request.input[3] = request.output[3] = g_tensor + 4096 * 3;
  const cuda::CollectiveArgs args = plan_launch(request, local_peers()).args;
  check(args.is_aligned && args.input[3] == request.input[3], "planned");
  request.output[3] = g_tensor + 4096 * 3 + 4;
  is_refused(request, {"overlap"}, local_peers());
  request.input[3] = request.output[3];
  check(!plan_launch(request, local_peers()).args.is_aligned, "one is not aligned");
}

void local_ranks_transfer_in_one_launch() {
  LaunchRequest request = good_request(Kernel::kTransfer);
  request.input = {nullptr, g_tensor};
  request.output = {};
  is_refused(request, {"no output of rank 2"}, local_peers());
  request.output = {nullptr, nullptr, g_tensor + 4096};
  (void)plan_launch(request, local_peers());
}

void unequal_shards_are_refused() {
  for (const Kernel kernel : {Kernel::kReduceScatter, Kernel::kAllGather}) {
    LaunchRequest request = good_request(kernel);
    request.output = {g_tensor + (1 << 15)};
    request.num_elems = 1001;
    is_refused(request, {cuda::name(kernel), "1001", "4 ranks", "pad"});
  }
}

void shards_in_place_are_the_own_ones() {
  LaunchRequest request = good_request(Kernel::kReduceScatter);
  request.output = {g_tensor + 1000};  // rank 1's 250 elements
  (void)plan_launch(request, good_peers());
  request.output = {g_tensor};
  is_refused(request, {"overlap"});
  request = good_request(Kernel::kAllGather);
  request.input = {g_tensor + 1000};
  (void)plan_launch(request, good_peers());
  request.input = {g_tensor + 2000};
  is_refused(request, {"overlap"});
}

void mapped_tensors_are_checked() {
  LaunchRequest request = good_request(Kernel::kTwoShotInPlace);
  is_refused(request, {"every rank's mapped tensor"});
  cuda::MappedTensors tensors{};
  request.tensors = &tensors;
  is_refused(request, {"tensor of rank 0 is not mapped"});
  for (int rank = 0; rank < 4; ++rank) tensors.of[rank] = g_tensor + 4096 * rank;
  is_refused(request, {"in place"});
  request.input = request.output = {tensors.of[1]};
  check(plan_launch(request, good_peers()).args.is_aligned, "aligned");
  tensors.of[3] += 4;
  check(!plan_launch(request, good_peers()).args.is_aligned, "not aligned");
}

// ---- the resulting plans

constexpr Kernel kKernels[] = {Kernel::kLowLatency,    Kernel::kOneShot,   Kernel::kTwoShot,
                               Kernel::kOrderedRing,   Kernel::kRing,      Kernel::kHierarchical,
                               Kernel::kReduceScatter, Kernel::kAllGather, Kernel::kBroadcast,
                               Kernel::kTransfer};

void nothing_to_do_launches_nothing() {
  for (const Kernel kernel : kKernels) {
    LaunchRequest request = good_request(kernel);
    request.num_elems = 0;
    request.input = request.output = {};
    check_equal(plan_launch(request, good_peers()).num_blocks, 0, cuda::name(kernel));
  }
}

void long_packets_are_refused() {
  LaunchRequest request = good_request(Kernel::kLowLatency);
  request.num_elems = 3 * 512;  // 3 channels of 4096 bytes, half of them data
  check_equal(plan_launch(request, good_peers()).num_blocks, 3, "blocks");
  request.num_elems += 1;
  is_refused(request, {"low_latency", "1536 elements of float32", "1537", "use one_shot"});
}

// For four ranks, in two groups if the kernel has groups. Shards are whole granules long, but equal
// shards are as long as the caller's tensors.
uint64_t shard_elems_of(Kernel kernel, uint64_t num_elems) {
  const auto rounded = [](uint64_t elems) {
    return (elems + kGranuleElems - 1) / kGranuleElems * kGranuleElems;
  };
  switch (kernel) {
    case Kernel::kReduceScatter:
    case Kernel::kAllGather:
      return num_elems / 4;
    case Kernel::kTwoShot:
    case Kernel::kTwoShotInPlace:
    case Kernel::kRing:
      return rounded((num_elems + 3) / 4);
    case Kernel::kHierarchical:
      return rounded((num_elems + 1) / 2);
    case Kernel::kLowLatency:
    case Kernel::kOneShot:
    case Kernel::kOrderedRing:
    case Kernel::kBroadcast:
    case Kernel::kTransfer:
      return rounded(num_elems);
  }
  return 0;
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
        check_equal(plan.args.chunk_elems % kGranuleElems, uint64_t{0}, what);
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
  LaunchRequest request = good_request(Kernel::kTwoShotInPlace);
  request.num_elems = 100'000;
  request.tensors = &tensors;
  for (size_t rank = 0; rank < 4; ++rank) {
    tensors.of[rank] = g_tensor + 16 * rank;  // never read
    request.input[rank] = request.output[rank] = tensors.of[rank];
  }
  const cuda::LaunchPlan local = plan_launch(request, local_peers());
  check(!local.waits, "waits");
  check_equal(local.args.chunk_elems, kTuning.free_chunk_bytes / 4, "chunk");
  check_equal(local.args.shard_elems, uint64_t{25'024}, "shards of whole granules");
  check_equal(local.args.num_chunks, uint64_t{9}, "chunks of a shard");
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

// ---- tunings

void tunings_that_no_kernel_could_work_by_are_refused() {
  cuda::check_tuning(kTuning);
  const auto refuses = [](const auto& change, std::initializer_list<std::string_view> words) {
    schedule::Tuning tuning = kTuning;
    change(tuning);
    const Error error = expect_error(ErrorKind::kValue, [&] { cuda::check_tuning(tuning); });
    for (const std::string_view word : words) check_contains(error.what(), word);
  };
  using schedule::Tuning;
  refuses([](Tuning& tuning) { tuning.num_channels = -1; }, {"num_channels is -1", "0"});
  for (const int threads : {-32, 0, 48, 544}) {
    refuses([&](Tuning& tuning) { tuning.free_threads = threads; },
            {"free_threads", std::to_string(threads), "a multiple of 32", "512"});
  }
  for (const size_t num_bytes : {size_t{0}, size_t{2048}, size_t{8200}, size_t{1} << 31}) {
    refuses([&](Tuning& tuning) { tuning.slot_bytes = num_bytes; },
            {"slot_bytes", std::to_string(num_bytes), "a multiple of 128", "4096"});
    refuses([&](Tuning& tuning) { tuning.free_chunk_bytes = num_bytes; },
            {"free_chunk_bytes", std::to_string(num_bytes), "a multiple of 128", "4096"});
  }
}

void every_row_of_the_table_is_taken() {
  for (const schedule::TuningRow& row : schedule::kTunings) {
    cuda::check_tuning(row.tuning);
    check(!row.tuning.provenance.empty(), "a row says where it comes from");
  }
}

// The smallest tuning that check_tuning() accepts has room for what any kernel moves at once.
void least_slots_and_chunks_take_every_dtype() {
  schedule::Tuning tuning = kTuning;
  tuning.slot_bytes = tuning.free_chunk_bytes = 4096;
  cuda::check_tuning(tuning);
  cuda::Peers peers = good_peers();
  peers.geometry.slot_bytes = tuning.slot_bytes;
  for (const Kernel kernel : {Kernel::kOrderedRing, Kernel::kHierarchical, Kernel::kTwoShot}) {
    for (size_t i = 0; i < kNumDTypes; ++i) {
      LaunchRequest request = good_request(kernel);
      request.format = {static_cast<DType>(i)};
      if (!is_defined(ReduceOp::kSum, request.format.dtype)) continue;
      request.is_bucket = is_wire_dtype(request.format.dtype);
      check(cuda::plan_launch(request, peers, tuning).args.chunk_elems > 0, "a slot");
      request.kernel = Kernel::kTwoShotInPlace;
      cuda::MappedTensors tensors{};
      for (size_t rank = 0; rank < 4; ++rank) {
        tensors.of[rank] = g_tensor + 16 * rank;
        request.input[rank] = request.output[rank] = tensors.of[rank];
      }
      request.tensors = &tensors;
      check(cuda::plan_launch(request, local_peers(), tuning).args.chunk_elems > 0, "a chunk");
    }
  }
}

constexpr schedule::TuningRow row(std::string_view gpu, schedule::Topology topology,
                                  int max_world_size, int num_channels) {
  return {gpu, topology, max_world_size, {.num_channels = num_channels}};
}

void the_row_that_fits_closest_is_found() {
  using schedule::Topology;
  // Deliberately not sorted.
  constexpr schedule::TuningRow kRows[] = {row("", Topology::kNvlink, 64, 1),
                                           row("NVIDIA H200", Topology::kNvlink, 8, 2),
                                           row("NVIDIA H200", Topology::kNvlink, 2, 3),
                                           row("NVIDIA H200 NVL", Topology::kNvlink, 4, 4),
                                           row("", Topology::kNvlink, 2, 5),
                                           row("NVIDIA H200", Topology::kPcie, 8, 6)};
  const auto found = [&](std::string_view gpu, Topology topology, int world_size) {
    const auto tuning = schedule::find_tuning(gpu, topology, world_size, kRows);
    return tuning ? tuning->num_channels : 0;
  };
  check_equal(found("NVIDIA H200", Topology::kNvlink, 2), 3, "fewest ranks of that GPU");
  check_equal(found("NVIDIA H200", Topology::kNvlink, 3), 2, "more ranks of that GPU");
  check_equal(found("NVIDIA H200", Topology::kNvlink, 9), 1, "more than its rows have");
  check_equal(found("NVIDIA H200 NVL", Topology::kNvlink, 2), 4, "the longest name");
  check_equal(found("NVIDIA H200 NVL", Topology::kNvlink, 5), 2, "the next longest name");
  check_equal(found("NVIDIA H200", Topology::kPcie, 2), 6, "its topology");
  check_equal(found("NVIDIA H20", Topology::kNvlink, 2), 5, "any GPU, few ranks");
  check_equal(found("", Topology::kNvlink, 64), 1, "any GPU");
  check_equal(found("", Topology::kPcie, 2), 0, "none");
  check_equal(found("", Topology::kNvlink, 65), 0, "too many ranks");
  check_equal(found("", Topology::kNvlink, 0), 0, "no ranks");
}

void ranks_of_different_gpus_have_the_general_row() {
  using schedule::GpuPlace, schedule::Topology;
  const auto common = [](std::initializer_list<GpuPlace> places) {
    const GpuPlace place = schedule::common_place({places.begin(), places.size()});
    return join(place.gpu, ' ', name(place.topology));
  };
  const GpuPlace h200{"H200", Topology::kNvlink}, h200_apart{"H200", Topology::kPcie},
      a100{"A100", Topology::kNvlink};
  check_equal(common({h200, h200, h200}), std::string("H200 nvlink"), "all alike");
  check_equal(common({h200, h200, a100}), std::string(" nvlink"), "another GPU last");
  check_equal(common({a100, h200, h200}), std::string(" nvlink"), "another GPU first");
  check_equal(common({h200, h200_apart, h200}), std::string("H200 pcie"), "one without NVLink");
}

void a_tuning_says_which_all_reduce_runs() {
  using schedule::Algorithm;
  const auto selects = [](uint64_t num_bytes, Algorithm expected, uint64_t most_packet_bytes) {
    check_equal(name(schedule::select_on_gpu(kTuning, 4, num_bytes, most_packet_bytes)),
                name(expected), join(num_bytes, " bytes"));
  };
  selects(4096, Algorithm::kLowLatency, 1 << 20);
  selects(4096, Algorithm::kLowLatency, 4096);
  selects(4096, Algorithm::kOneShot, 4095);
  selects(4097, Algorithm::kTwoShot, 1 << 20);
  selects(4096 * 4, Algorithm::kTwoShot, 1 << 20);
  // What local ranks run instead (tensor/cuda/local_group.cpp) has no waits between ranks.
  for (const uint64_t num_bytes : {1, 4096, 1 << 20}) {
    check_equal(name(schedule::select_on_gpu(schedule::kLocalTuning, 2, num_bytes, 1 << 20)),
                name(Algorithm::kTwoShot), "of local ranks");
  }
}

// ---- buckets

void wrong_buckets_are_refused() {
  const cuda::Tile tile{g_tensor, 512};
  const cuda::BucketArgs good{&tile, {}, 1, g_tensor, 1, 1};
  const WireFormat wire{DType::kFloat16, true};
  cuda::check_bucket(good, DType::kFloat32, wire);
  const auto refuses = [](const cuda::BucketArgs& args, DType dtype, const WireFormat& format,
                          std::string_view word) {
    const Error error =
        expect_error(ErrorKind::kValue, [&] { cuda::check_bucket(args, dtype, format); });
    check_contains(error.what(), word);
  };
  refuses(good, DType::kInt32, wire, "int32");
  refuses(good, DType::kFloat8E4M3, wire, "float8_e4m3fn");
  refuses(good, DType::kFloat32, {DType::kFloat64}, "no wire dtype");
  refuses(good, DType::kFloat32, {DType::kBFloat16, true}, "no block scaling");
  cuda::BucketArgs args = good;
  args.tiles = nullptr;
  refuses(args, DType::kFloat32, wire, "no list of them");
  args.contiguous = {nullptr, 512};
  refuses(args, DType::kFloat32, wire, "no data");
  args.contiguous = {g_tensor, 512};
  cuda::check_bucket(args, DType::kFloat32, wire);
  args.contiguous = {g_tensor, 513};
  refuses(args, DType::kFloat32, wire, "513 elements");
  args = good;
  args.wire += 8;
  refuses(args, DType::kFloat32, wire, "multiples of 16");
  for (const float factor : {0.0f, -1.0f, NAN, INFINITY, 1e-42f}) {
    args = good;
    args.contribution_factor = factor;
    refuses(args, DType::kFloat32, wire, "factor");
  }
}

// ---- from a call to the launch request of its kernel

void calls_are_asked_of_their_kernels() {
  constexpr int kWorldSize = 4;
  const Planner planner(kWorldSize);
  const auto request_for = [](const Call& call) { return cuda::request_for(call, kWorldSize); };
  const schedule::Algorithm two_shot = schedule::Algorithm::kTwoShot;

  const LaunchRequest plain =
      request_for(planner.all_reduce(DType::kFloat32, 1000, {.algorithm = two_shot}));
  check(plain.kernel == Kernel::kTwoShot && !plain.is_bucket, "all_reduce");
  check_equal(plain.num_elems, uint64_t{1000}, "elements of all_reduce");
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
  check_equal(broadcast.num_elems, uint64_t{40}, "bytes of broadcast");
  const LaunchRequest gather =
      request_for(planner.collective(CollectiveKind::kAllGather, DType::kFloat32, 10));
  check(gather.kernel == Kernel::kAllGather && gather.format == cuda::kBytes, "all_gather");
  check_equal(gather.num_elems, uint64_t{160}, "bytes of all_gather");
  const LaunchRequest scatter = request_for(
      planner.collective(CollectiveKind::kReduceScatter, DType::kFloat16, 10, ReduceOp::kMax));
  check(scatter.kernel == Kernel::kReduceScatter && scatter.op == ReduceOp::kMax, "reduce_scatter");
  check_equal(scatter.num_elems, uint64_t{40}, "elements of reduce_scatter");
  expect_error(ErrorKind::kValue, [&] { request_for({.kind = CollectiveKind::kBarrier}); });
}

const CaseTable kCases{
    {"launch_request", calls_are_asked_of_their_kernels},
    {"launch_wrong_worlds", wrong_worlds_are_refused},
    {"launch_small_slots", slots_too_small_are_refused},
    {"launch_wrong_arithmetic", wrong_arithmetic_is_refused},
    {"launch_wrong_groups", wrong_groups_are_refused},
    {"launch_wrong_peers", wrong_ends_are_refused},
    {"launch_wrong_tensors", wrong_tensors_are_refused},
    {"launch_local_tensors", tensors_of_every_local_rank_are_checked},
    {"launch_local_transfer", local_ranks_transfer_in_one_launch},
    {"launch_unequal_shards", unequal_shards_are_refused},
    {"launch_shards_in_place", shards_in_place_are_the_own_ones},
    {"launch_mapped_tensors", mapped_tensors_are_checked},
    {"launch_nothing", nothing_to_do_launches_nothing},
    {"launch_long_packets", long_packets_are_refused},
    {"launch_chunks", chunks_fit_and_cover},
    {"launch_free_blocks", blocks_that_wait_for_nobody_outnumber_channels},
    {"launch_wrong_tunings", tunings_that_no_kernel_could_work_by_are_refused},
    {"launch_table", every_row_of_the_table_is_taken},
    {"launch_least_tuning", least_slots_and_chunks_take_every_dtype},
    {"launch_closest_row", the_row_that_fits_closest_is_found},
    {"launch_common_row", ranks_of_different_gpus_have_the_general_row},
    {"launch_selection", a_tuning_says_which_all_reduce_runs},
    {"launch_averages", averages_by_powers_of_two_multiply},
    {"launch_wrong_buckets", wrong_buckets_are_refused},
};

}  // namespace
}  // namespace rota::test
