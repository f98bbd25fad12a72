// Every collective on every rank of small worlds: each algorithm, dtype, op and size class.
#include <cmath>
#include <set>

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "ranks.h"
#include "reference.h"
#include "schedule/chunk.h"
#include "schedule/ring.h"

namespace rota::test {
namespace {

// Sizes around every limit that a size is compared with.
std::set<uint64_t> interesting_sizes(int world_size, DType wire) {
  const auto p = static_cast<uint64_t>(world_size);
  const uint64_t message = kSmall.message_bytes / info(wire).num_bytes;
  const uint64_t slot = kSmall.slot_bytes / info(wire).num_bytes;
  return {0,           1,        p - 1, p,        p + 1,        message - 1,  message,
          message + 1, slot - 1, slot,  slot + 1, 2 * slot + p, p * slot - 1, 5 * slot / 2 + 3};
}

// Ranks wait in different ways, and change theirs from call to call.
CallerThread thread_for(const Communicator& communicator, uint64_t seed) {
  return (seed + static_cast<uint64_t>(communicator.rank())) % 2 == 0 ? CallerThread::kUser
                                                                      : CallerThread::kProgress;
}

void all_reduce_is_exact(int world_size, schedule::Algorithm algorithm) {
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    for (const DType dtype : reducible_dtypes()) {
      for (const ReduceOp op : defined_ops(dtype)) {
        for (const uint64_t num_elems : interesting_sizes(world_size, dtype)) {
          ++seed;
          call_and_check(communicator,
                         {.num_elems = num_elems, .dtype = dtype, .op = op, .algorithm = algorithm},
                         seed, thread_for(communicator, seed));
        }
      }
    }
  });
}

void all_reduce_through_narrower_wire_is_exact(int world_size) {
  constexpr std::pair<DType, DType> kCasts[] = {
      {DType::kFloat32, DType::kFloat16},  {DType::kFloat32, DType::kBFloat16},
      {DType::kFloat64, DType::kFloat16},  {DType::kFloat64, DType::kBFloat16},
      {DType::kFloat64, DType::kFloat32},  {DType::kFloat16, DType::kBFloat16},
      {DType::kBFloat16, DType::kFloat16},
  };
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    for (const auto& [dtype, wire] : kCasts) {
      for (const ReduceOp op : defined_ops(dtype)) {
        for (const schedule::Algorithm algorithm : kAlgorithms) {
          for (const uint64_t num_elems : interesting_sizes(world_size, wire)) {
            ++seed;
            TestCall call{.num_elems = num_elems,
                          .dtype = dtype,
                          .op = op,
                          .algorithm = algorithm,
                          .wire = wire};
            if (algorithm == schedule::Algorithm::kRing && seed % 2 == 0) call.hop = wire;
            call_and_check(communicator, call, seed, thread_for(communicator, seed));
          }
        }
      }
    }
  });
}

// Inputs of varied magnitudes, whose rounded sum depends on the order of the ranks.
uint64_t uneven_input(DType dtype, int rank, uint64_t elem) {
  Random random(elem * 64 + static_cast<uint64_t>(rank));
  const double mantissa = 1 + static_cast<double>(random.below(1 << 20)) / (1 << 20);
  const double value = std::ldexp(mantissa, random.below(12) - 6);
  return round_to(dtype, random.below(2) == 0 ? value : -value);
}

std::vector<std::byte> reduce_uneven(Communicator& communicator, DType dtype, DType wire,
                                     ReduceOp op, schedule::Algorithm algorithm,
                                     uint64_t num_elems) {
  std::vector<std::byte> data(num_elems * info(dtype).num_bytes);
  for (uint64_t i = 0; i < num_elems; ++i) {
    store_bits(dtype, data.data(), i, uneven_input(dtype, communicator.rank(), i));
  }
  const Call call =
      Planner(communicator.world_size())
          .all_reduce(dtype, num_elems, {.op = op, .algorithm = algorithm, .wire = wire});
  communicator.run(call, {.data = data.data()}, CallerThread::kUser);
  return data;
}

void all_reduce_sums_in_ascending_rank(int world_size) {
  constexpr std::pair<DType, DType> kCasts[] = {
      {DType::kFloat32, DType::kFloat32}, {DType::kFloat64, DType::kFloat64},
      {DType::kFloat16, DType::kFloat16}, {DType::kBFloat16, DType::kBFloat16},
      {DType::kFloat32, DType::kFloat16}, {DType::kFloat64, DType::kBFloat16},
  };
  run_ranks(world_size, [&](Communicator& communicator) {
    for (const auto& [dtype, wire] : kCasts) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct}) {
        for (const uint64_t num_elems : {100, 5000}) {
          // A contribution is rounded to the wire dtype once, and so is the sum.
          std::vector<uint64_t> expected(num_elems);
          for (uint64_t i = 0; i < num_elems; ++i) {
            std::vector<uint64_t> srcs;
            for (int rank = 0; rank < world_size; ++rank) {
              srcs.push_back(round_to(wire, to_double(dtype, uneven_input(dtype, rank, i))));
            }
            const uint64_t sum = reduce_scalars(wire, op, srcs, world_size);
            expected[i] = round_to(dtype, to_double(wire, sum));
          }
          for (const auto algorithm : {schedule::Algorithm::kOneShot, schedule::Algorithm::kTwoShot,
                                       schedule::Algorithm::kOrderedRing}) {
            const auto data = reduce_uneven(communicator, dtype, wire, op, algorithm, num_elems);
            for (uint64_t i = 0; i < num_elems; ++i) {
              if (load_bits(dtype, data.data(), i) == expected[i]) continue;
              fail(join(schedule::name(algorithm), ' ', name(op), ' ', name(dtype), " as ",
                        name(wire), ": element ", i, " is not the sum in ascending rank"));
            }
          }
        }
      }
    }
  });
}

// The classic ring: shard k of the tensor is summed around the ring, from rank k on.
void ring_sums_from_the_rank_of_the_shard(int world_size) {
  constexpr uint64_t kNumElems = 20'011;  // several rounds of 8 ranks
  constexpr DType kDType = DType::kFloat32;
  run_ranks(world_size, [&](Communicator& communicator) {
    const auto data = reduce_uneven(communicator, kDType, kDType, ReduceOp::kSum,
                                    schedule::Algorithm::kRing, kNumElems);
    for (int shard = 0; shard < world_size; ++shard) {
      const auto range = schedule::even_shard(kNumElems, static_cast<uint64_t>(world_size),
                                              static_cast<uint64_t>(shard), 64);
      for (uint64_t i = range.begin; i < range.begin + range.num_elems; ++i) {
        std::vector<uint64_t> srcs;
        for (int step = 0; step < world_size; ++step) {
          srcs.push_back(uneven_input(kDType, (shard + step) % world_size, i));
        }
        check_equal(load_bits(kDType, data.data(), i),
                    reduce_scalars(kDType, ReduceOp::kSum, srcs, world_size),
                    join("element ", i, " of shard ", shard));
      }
    }
  });
}

// With a root and with parts, in all their lengths.
void others_are_exact(int world_size) {
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    using enum CollectiveKind;
    for (const CollectiveKind kind :
         {kReduce, kReduceScatter, kBroadcast, kAllGather, kGather, kScatter, kAllToAll}) {
      for (const DType dtype : {DType::kFloat32, DType::kUInt8, DType::kComplex128}) {
        if (row_of(kind).reduces && !info(dtype).is_reducible) continue;
        for (const uint64_t num_elems : interesting_sizes(world_size, dtype)) {
          for (int root = 0; root < (row_of(kind).has_root() ? world_size : 1); ++root) {
            ++seed;
            call_and_check(communicator,
                           {.kind = kind, .num_elems = num_elems, .dtype = dtype, .root = root},
                           seed, thread_for(communicator, seed));
          }
        }
      }
    }
  });
}

void misaligned_tensors_are_exact() {
  run_ranks(2, [](Communicator& communicator) {
    uint64_t seed = 0;
    for (const DType dtype : reducible_dtypes()) {
      for (const schedule::Algorithm algorithm : kAlgorithms) {
        for (const size_t misalignment : {1, 3, 8, 60}) {
          for (const uint64_t num_elems : {5, 3000}) {
            ++seed;
            TestCall call{.num_elems = num_elems,
                          .dtype = dtype,
                          .algorithm = algorithm,
                          .misalignment = misalignment};
            call_and_check(communicator, call, seed);
            if (info(dtype).is_floating && info(dtype).num_bytes > 1) {
              call.wire = dtype == DType::kBFloat16 ? DType::kFloat16 : DType::kBFloat16;
              call_and_check(communicator, call, seed);
            }
          }
        }
      }
    }
  });
}

// No rank may leave a barrier before the last one has arrived.
void barrier_holds_until_all_have_come(int world_size) {
  constexpr int kNumBarriers = 200;
  std::atomic<int> num_arrived{0};
  run_ranks(world_size, [&](Communicator& communicator) {
    for (int i = 1; i <= kNumBarriers; ++i) {
      num_arrived.fetch_add(1);
      communicator.barrier(thread_for(communicator, static_cast<uint64_t>(i)));
      check(num_arrived.load() >= i * world_size, "a rank left a barrier early");
    }
  });
}

using schedule::Algorithm;

const CaseTable kCases{
    {"all_reduce-ws1", all_reduce_is_exact, 1, Algorithm::kOneShot},
    {"one_shot-ws2", all_reduce_is_exact, 2, Algorithm::kOneShot},
    {"one_shot-ws3", all_reduce_is_exact, 3, Algorithm::kOneShot},
    {"one_shot-ws4", all_reduce_is_exact, 4, Algorithm::kOneShot},
    {"two_shot-ws2", all_reduce_is_exact, 2, Algorithm::kTwoShot},
    {"two_shot-ws3", all_reduce_is_exact, 3, Algorithm::kTwoShot},
    {"two_shot-ws4", all_reduce_is_exact, 4, Algorithm::kTwoShot},
    {"ordered_ring-ws2", all_reduce_is_exact, 2, Algorithm::kOrderedRing},
    {"ordered_ring-ws3", all_reduce_is_exact, 3, Algorithm::kOrderedRing},
    {"ordered_ring-ws4", all_reduce_is_exact, 4, Algorithm::kOrderedRing},
    {"ring-ws2", all_reduce_is_exact, 2, Algorithm::kRing},
    {"ring-ws3", all_reduce_is_exact, 3, Algorithm::kRing},
    {"ring-ws4", all_reduce_is_exact, 4, Algorithm::kRing},
    {"wire_dtype-ws1", all_reduce_through_narrower_wire_is_exact, 1},
    {"wire_dtype-ws3", all_reduce_through_narrower_wire_is_exact, 3},
    {"ascending_order-ws3", all_reduce_sums_in_ascending_rank, 3},
    {"ascending_order-ws8", all_reduce_sums_in_ascending_rank, 8},
    {"ring_order-ws2", ring_sums_from_the_rank_of_the_shard, 2},
    {"ring_order-ws4", ring_sums_from_the_rank_of_the_shard, 4},
    {"ring_order-ws8", ring_sums_from_the_rank_of_the_shard, 8},
    {"others-ws1", others_are_exact, 1},
    {"others-ws2", others_are_exact, 2},
    {"others-ws3", others_are_exact, 3},
    {"others-ws4", others_are_exact, 4},
    {"misaligned_tensors-ws2", misaligned_tensors_are_exact},
    {"barrier-ws2", barrier_holds_until_all_have_come, 2},
    {"barrier-ws4", barrier_holds_until_all_have_come, 4},
};

}  // namespace
}  // namespace rota::test
