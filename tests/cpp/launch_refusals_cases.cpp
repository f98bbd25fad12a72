// Which launches are refused, and with which messages.
#include <cmath>

#include "check.h"
#include "launch_requests.h"

namespace rota::test {
namespace {

using cuda::Kernel;
using cuda::LaunchRequest;

void is_refused(const LaunchRequest& request, std::initializer_list<std::string_view> words,
                const cuda::Peers& peers = good_peers()) {
  expect_error(ErrorKind::kValue, [&] { (void)plan_launch(request, peers); }, words);
}

void wrong_worlds_are_refused() {
  using cuda::Peers;
  const auto refuses = [](const auto& change, std::initializer_list<std::string_view> words) {
    Peers peers = good_peers();
    change(peers);
    is_refused(good_request(Kernel::kTwoShot), words, peers);
  };
  for (const int number : {-1, 0, 1, 65}) {
    refuses([&](Peers& peers) { peers.geometry.world_size = number; },
            {"world_size", std::to_string(number), "2 to 64"});
  }
  Peers alone = good_peers();
  alone.first_rank = 0;
  alone.geometry.world_size = 1;
  plan_launch(good_request(Kernel::kOneShot), alone);
  for (const int rank : {-1, 4}) {
    refuses([&](Peers& peers) { peers.first_rank = rank; },
            {"rank", std::to_string(rank), "0 to 3"});
  }
  for (const int number : {0, 4}) {
    refuses([&](Peers& peers) { peers.num_local_ranks = number; },
            {"num_local_ranks", std::to_string(number), "1 to 3"});
  }
  refuses([](Peers& peers) { peers.geometry.num_channels = 0; },
          {"num_channels", "0", "1 or more"});
  refuses([](Peers& peers) { peers.geometry.slot_bytes = 1000; },
          {"slot_bytes", "1000", "multiples of 128"});
  refuses([](Peers& peers) { peers.geometry.packet_bytes = 100; },
          {"packet_bytes", "100", "multiples of 128"});
  refuses([](Peers& peers) { peers.regions[2] = nullptr; }, {"region of rank 2"});
  refuses([](Peers& peers) { peers.regions[3] += 16; }, {"region of rank 3", "multiple of 128"});
  refuses([](Peers& peers) { peers.abort = nullptr; }, {"aborts"});
  refuses([](Peers& peers) { peers.num_left = nullptr; }, {"ranks that left"});
  refuses([](Peers& peers) { peers.stall = nullptr; }, {"stalls"});
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

void wrong_arithmetic_is_refused() {
  LaunchRequest request = good_request(Kernel::kTwoShot);
  request.format = {DType::kBool};
  request.op = ReduceOp::kAvg;
  is_refused(request, {"two_shot", "avg", "bool"});
  for (const double divisor : {2.5, 0x1p40}) {
    request.format = {DType::kInt32};
    request.divisor = divisor;
    is_refused(request, {"divisor", "int32", "whole"});
  }
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
  request = mapped_request(tensors);
  request.input = request.output = {g_tensor};
  is_refused(request, {"in place"});
  request.input = request.output = {tensors.of[1]};
  check(plan_launch(request, good_peers()).args.is_aligned, "aligned");
  tensors.of[3] += 4;
  check(!plan_launch(request, good_peers()).args.is_aligned, "not aligned");
}

void long_packets_are_refused() {
  LaunchRequest request = good_request(Kernel::kLowLatency);
  request.num_elems = 3 * 512;  // 3 channels of 4096 bytes, half of them data
  check_equal(plan_launch(request, good_peers()).num_blocks, 3, "blocks");
  request.num_elems += 1;
  is_refused(request, {"low_latency", "1536 elements of float32", "1537", "use one_shot"});
}

void wrong_buckets_are_refused() {
  const cuda::Tile tile{g_tensor, 512};
  const cuda::BucketArgs good{&tile, {}, 1, g_tensor, 1, 1};
  const WireFormat wire{DType::kFloat16, true};
  cuda::check_bucket(good, DType::kFloat32, wire);
  const auto refuses = [](const cuda::BucketArgs& args, DType dtype, const WireFormat& format,
                          std::string_view word) {
    expect_error(ErrorKind::kValue, [&] { cuda::check_bucket(args, dtype, format); }, {word});
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

const CaseTable kCases{
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
    {"launch_long_packets", long_packets_are_refused},
    {"launch_wrong_buckets", wrong_buckets_are_refused},
};

}  // namespace
}  // namespace rota::test
