// Collectives that an abort ends, and ranks that leave behind the last one, at any moment; calls as
// words.
#include <atomic>
#include <thread>

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "cuda/sums.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;

void departure_behind_last_collective_is_no_failure() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<TestCall> calls{{.num_elems = 5000, .node_size = 2}};
    for (const auto algorithm : kAlgorithms) {
      calls.push_back({.num_elems = 5000, .algorithm = algorithm});  // several slots
    }
    for (const TestCall& call : calls) {
      run_ranks(4, [&](Communicator& communicator) {
        call_and_check(communicator, call, seed, CallerThread::kProgress);
      });
    }
  }
}

void abort_at_any_moment(int world_size, int num_groups) {
  for (int group = 0; group < num_groups; ++group) {
    run_ranks(world_size, [&](Communicator& communicator) {
      call_until_aborted(
          communicator.rank(), world_size, group, 3000,
          [&](const char* why) { communicator.abort(why); },
          [&](const TestCall& call, uint64_t seed) {
            call_and_check(communicator, call, seed, CallerThread::kProgress);
          });
    });
  }
}

// Python does not deliver signals to the progress thread.
void progress_thread_is_not_interrupted() {
  std::atomic<bool> was_asked{false};
  run_ranks(2,
            [&](Communicator& communicator) {
              if (communicator.rank() == 1) std::this_thread::sleep_for(milliseconds(5));
              communicator.barrier(CallerThread::kProgress);
            },
            {.check_interrupt = [&] { was_asked = true; }});
  check(!was_asked, "check_interrupt ran on the progress thread");
}

// The pending sums of a tree are registers of a kernel. Integers need no tree, whatever their
// number.
void plan_for_gpu_takes_trees_of_few_ranks() {
  const auto plan = [](int world_size, DType dtype) {
    const Planner planner(world_size,
                          Planner::Gpu{.tuning = schedule::kLocalTuning, .most_packet_bytes = 0});
    return planner.all_reduce(dtype, 1, {.order = {.is_tree = true}}).order;
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat8E4M3, DType::kInt8}) {
    check_equal(plan(cuda::kMostTreeRanks, dtype).num_shards, 16u, name(dtype));
  }
  check_equal(plan(cuda::kMostTreeRanks + 1, DType::kInt8).num_shards, 32u, "integers");
  expect_error(ErrorKind::kValue, [&] { plan(cuda::kMostTreeRanks + 1, DType::kFloat32); },
               {"on GPUs is for up to 16 ranks, world_size is 17"});
}

void call_survives_its_words() {
  for (size_t kind = 0; kind < kCollectives.size(); ++kind) {
    for (const DType dtype : reducible_dtypes()) {
      for (const ReduceOp op : defined_ops(dtype)) {
        for (const schedule::Algorithm algorithm : kAlgorithms) {
          const Call call{.kind = static_cast<CollectiveKind>(kind),
                          .op = op,
                          .dtype = dtype,
                          .wire = dtype,
                          .hop = info(dtype).accumulate,
                          .algorithm = algorithm,
                          .root = 3,
                          .num_elems = uint64_t{1} << 40,
                          .uneven = 11,
                          .pass = {.contribution_factor = 2,
                                   .divisor = 3,
                                   .result_factor = 5,
                                   .has_residual = true,
                                   .stochastic_seed = 7}};
          check(Call::from_words(call.to_words()) == call, call.to_string());
          check(call.to_words()[0] != 0, "a call is told from memory at rest");
        }
      }
    }
  }
  const DType one_byte = moved_dtype(44, 1), wide = moved_dtype(255, 16);
  for (const DType dtype : {one_byte, wide}) {
    const Call call{.kind = CollectiveKind::kBroadcast, .dtype = dtype, .num_elems = 3};
    check(Call::from_words(call.to_words()) == call, "a dtype that is only moved");
  }
  check_equal(Call{.dtype = one_byte, .num_elems = 3}.num_bytes(), 3u, "bytes");
  check_equal(Call{.dtype = wide, .num_elems = 3}.num_bytes(), 48u, "bytes");
  // Words from another process may hold anything; to_string() must cope with that.
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Call::Words words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = mix(seed * 8 + i);
    check(!Call::from_words(words).to_string().empty(), "a text");
  }
}

// Only the two ranks of a pair know how long its part is, and yet all ranks learn that they
// disagree.
void all_to_all_of_other_lengths_is_an_error_everywhere() {
  run_ranks(3, [](Communicator& communicator) {
    const int rank = communicator.rank();
    std::byte bytes[8]{};
    for (const uint64_t expected : {uint64_t{2}, uint64_t{0}, ~uint64_t{0}}) {
      // Rank 2 sends 1 element to rank 0.
      std::vector<cpu::Part> inputs(3, {bytes, 1}), outputs(3, {bytes, 1});
      if (rank == 0) outputs[2].num_elems = expected;
      expect_error(ErrorKind::kMismatch,
                   [&] {
                     communicator.run({.kind = CollectiveKind::kAllToAll},
                                      {.inputs = inputs.data(), .outputs = outputs.data()},
                                      CallerThread::kUser);
                   },
                   {join("rank 2 sends 1 elements to rank 0, which expects ", expected)});
      communicator.barrier(CallerThread::kUser);  // the group stays usable
    }
  });
}

const CaseTable kCases{
    {"departure_behind_last_collective-ws4", departure_behind_last_collective_is_no_failure},
    {"abort_at_any_moment-ws2", abort_at_any_moment, 2, 60},
    {"abort_at_any_moment-ws4", abort_at_any_moment, 4, 40},
    {"progress_thread_not_interrupted-ws2", progress_thread_is_not_interrupted},
    {"plan_gpu_trees", plan_for_gpu_takes_trees_of_few_ranks},
    {"all_to_all_of_other_lengths-ws3", all_to_all_of_other_lengths_is_an_error_everywhere},
    {"call_words", call_survives_its_words},
};

}  // namespace
}  // namespace rota::test
