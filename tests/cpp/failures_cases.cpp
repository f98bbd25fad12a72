// Failures in a collective: every rank gets an error that names the problem and the culprit, and
// nobody waits for ever. Timeouts here only bound how long a test may hang, or end a wait on
// purpose.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "cpu/float_environment.h"
#include "cuda/sums.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;

void barrier(Communicator& communicator) { communicator.barrier(CallerThread::kProgress); }

// ---- ranks that disagree ----

// Rank 1 calls `odd`, all others `usual`: every rank gets an error, and the group stays usable.
void disagreement_is_an_error_everywhere(int world_size, const TestCall& usual,
                                         const TestCall& odd) {
  run_ranks(world_size, [&](Communicator& communicator) {
    const bool is_odd = communicator.rank() == 1;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Error error = expect_error(
          ErrorKind::kMismatch, [&] { call_and_check(communicator, is_odd ? odd : usual, seed); });
      check_contains(error.what(), "rank 1 called ");
      check_contains(error.what(), world_size == 2 ? "rank 0 called " : "ranks 0, 2 called ");
      call_and_check(communicator, usual, seed);
    }
  });
}

constexpr uint64_t kLong = 5000;  // elements that take several slots

constexpr TestCall kUsual{.num_elems = 10};
constexpr TestCall kUsualLong{.num_elems = kLong};

void mismatch_writes_nothing() {
  run_ranks(2, [](Communicator& communicator) {
    for (const uint64_t num_elems : {uint64_t{10}, kLong}) {
      std::vector<float> data(num_elems + 1, 7.0f);
      const Call call = Planner(2).all_reduce(
          DType::kFloat32, num_elems + static_cast<uint64_t>(communicator.rank()), {});
      expect_error(ErrorKind::kMismatch,
                   [&] { communicator.run(call, {.data = data.data()}, CallerThread::kUser); });
      for (const float value : data) check_equal(value, 7.0f, "an element after a mismatch");
    }
  });
}

// ---- absent peers ----

void absent_peer_is_a_timeout(CallerThread thread) {
  std::atomic<bool> has_failed{false};
  run_ranks(3,
            [&](Communicator& communicator) {
              barrier(communicator);  // from here on rank 1 is the only late one
              if (communicator.rank() == 1) {
                has_failed.wait(false);
                // A rank that comes too late gets the error of the first rank that gave up.
                const Error error =
                    expect_error(ErrorKind::kTimeout, [&] { communicator.barrier(thread); });
                check_contains(error.what(), "failed: rota.barrier: rank ");
                return;
              }
              const Error error =
                  expect_error(ErrorKind::kTimeout, [&] { communicator.barrier(thread); });
              check_contains(error.what(), "is rank 1 alive?");
              has_failed = true;
              has_failed.notify_all();
              const Error later =
                  expect_error(ErrorKind::kTimeout, [&] { communicator.barrier(thread); });
              check_contains(later.what(), "the group is dead");
            },
            {.timeout = milliseconds(500)});
}

void departed_peer_is_a_failure(CallerThread thread) {
  run_ranks(3, [&](Communicator& communicator) {
    barrier(communicator);
    if (communicator.rank() == 2) return;
    const Error error = expect_error(ErrorKind::kPeerFailed, [&] { communicator.barrier(thread); });
    check_contains(error.what(), "rank 2");
    check_contains(error.what(), "has left the group");
  });
}

// A rank that closes right after the last collective has done its part in it.
void departure_behind_last_collective_is_no_failure() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const schedule::Algorithm algorithm : kAlgorithms) {
      run_ranks(4, [&](Communicator& communicator) {
        call_and_check(communicator, {.num_elems = kLong, .algorithm = algorithm}, seed,
                       CallerThread::kProgress);
      });
    }
  }
}

// ---- abort and interruption ----

// abort() from another thread of any rank ends the waits of all ranks, and every later call.
void abort_ends_waits(int aborting_rank, CallerThread thread) {
  std::atomic<int> num_waiting{0};
  std::atomic<bool> has_aborted{false};
  run_ranks(3, [&](Communicator& communicator) {
    std::jthread other;
    if (communicator.rank() == aborting_rank) {
      other = std::jthread([&] {
        while (num_waiting.load() < 2) std::this_thread::yield();
        communicator.abort("because of a test");
        has_aborted = true;
        has_aborted.notify_all();
      });
    }
    const auto expect_the_reason = [&] {
      try {
        communicator.barrier(thread);
      } catch (const Error& error) {
        return check_contains(error.what(), "because of a test");
      }
      fail("a barrier returned in spite of an abort");
    };
    if (communicator.rank() != 2) {  // the others wait for rank 2
      num_waiting.fetch_add(1);
      expect_the_reason();
    }
    has_aborted.wait(false);
    // Rank 2 gets the reason too, although it did not wait, and so does every later call.
    expect_the_reason();
    expect_the_reason();
  });
}

// An abort at any moment of any collective ends it on all ranks.
void abort_at_any_moment(int world_size, int num_groups) {
  for (int group = 0; group < num_groups; ++group) {
    std::atomic<int> num_failed{0};
    run_ranks(world_size, [&](Communicator& communicator) {
      Random same_on_all_ranks(static_cast<uint64_t>(group));
      std::jthread other;
      if (communicator.rank() == group % world_size) {
        other = std::jthread([&communicator, group] {
          usleep(static_cast<useconds_t>(mix(static_cast<uint64_t>(group)) % 3000));
          communicator.abort("at some moment");
        });
      }
      try {
        for (uint64_t seed = 0;; ++seed) {
          TestCall call = random_call(same_on_all_ranks, communicator.world_size());
          call.in_heap = 0;  // peers may read it after an abort, see heap_cases.cpp
          call_and_check(communicator, call, seed, CallerThread::kProgress);
        }
      } catch (const Error& error) {
        check_contains(error.what(), "at some moment");
        ++num_failed;
      }
    });
    check_equal(num_failed.load(), world_size, "ranks that heard of the abort");
  }
}

struct Interruption : std::exception {};

void interruption_passes_and_peers_hear(CallerThread thread) {
  std::atomic<bool> was_interrupted{false};
  run_ranks(2,
            [&](Communicator& communicator) {
              if (communicator.rank() == 1) {
                was_interrupted.wait(false);
                const Error error =
                    expect_error(ErrorKind::kPeerFailed, [&] { communicator.barrier(thread); });
                check_contains(error.what(), "was interrupted");
                return;
              }
              try {
                communicator.barrier(CallerThread::kUser);
                fail("the barrier returned");
              } catch (const Interruption&) {
              }
              was_interrupted = true;
              was_interrupted.notify_all();
              expect_error(ErrorKind::kInternal,
                           [&] { communicator.barrier(CallerThread::kUser); });
            },
            {.check_interrupt = [&] {
              if (!was_interrupted) throw Interruption();
            }});
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

// ---- arguments ----

void plan_refuses_what_cannot_be() {
  const Planner planner(2);
  const auto refuse = [&](ErrorKind kind, DType dtype, const AllReduceOptions& options) {
    expect_error(kind, [&] { planner.all_reduce(dtype, 1, options); });
  };
  refuse(ErrorKind::kType, DType::kBool, {.op = ReduceOp::kAvg});
  refuse(ErrorKind::kType, DType::kFloat32, {.op = ReduceOp::kBand});
  refuse(ErrorKind::kType, DType::kFloat16, {.wire = DType::kFloat32});
  refuse(ErrorKind::kType, DType::kInt32, {.wire = DType::kInt16});
  refuse(ErrorKind::kValue, DType::kFloat16, {.hop = DType::kFloat16});
  refuse(ErrorKind::kType, DType::kFloat16,
         {.algorithm = schedule::Algorithm::kRing, .hop = DType::kFloat64});
  refuse(ErrorKind::kValue, DType::kFloat32, {.algorithm = schedule::Algorithm::kLowLatency});
  for (const int root : {-1, 2}) {
    expect_error(ErrorKind::kValue, [&] { planner.check_root(CollectiveKind::kBroadcast, root); });
  }
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
  const Error error =
      expect_error(ErrorKind::kValue, [&] { plan(cuda::kMostTreeRanks + 1, DType::kFloat32); });
  check_contains(error.what(), "on GPUs is for up to 16 ranks, world_size is 17");
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
      const Error error = expect_error(ErrorKind::kMismatch, [&] {
        communicator.run({.kind = CollectiveKind::kAllToAll},
                         {.inputs = inputs.data(), .outputs = outputs.data()}, CallerThread::kUser);
      });
      check_contains(error.what(),
                     join("rank 2 sends 1 elements to rank 0, which expects ", expected));
      communicator.barrier(CallerThread::kUser);  // the group stays usable
    }
  });
}

// ---- the caller's floating-point mode ----

// Results do not change if the caller has set the CPU to flush denormals or to round towards zero.
void float_mode_of_caller_changes_nothing() {
#if defined(__x86_64__)
  constexpr unsigned kModes[] = {0x8000, 0x0040, 0x8040, 0x6000};  // FZ, DAZ, both, RC to zero
  run_ranks(2, [&](Communicator& communicator) {
    const float rank_half = communicator.rank() == 0 ? 0x1p-127f : 0x1p-128f;  // denormals
    const float rank_tie = communicator.rank() == 0 ? 1.0f : 0x1.8p-24f;       // rounds up
    for (const schedule::Algorithm algorithm : kAlgorithms) {
      for (const unsigned mode : kModes) {
        const unsigned usual = _mm_getcsr();
        float data[] = {rank_half, rank_tie};
        const Call call = Planner(2).all_reduce(DType::kFloat32, 2, {.algorithm = algorithm});
        _mm_setcsr(usual | mode);
        communicator.run(call, {.data = data}, CallerThread::kUser);
        const unsigned after = _mm_getcsr();
        _mm_setcsr(usual);
        check_equal(after & 0xffc0u, (usual | mode) & 0xffc0u, "the caller's mode afterwards");
        check_equal(data[0], 0x1.8p-127f, "a sum of denormals");
        check_equal(data[1], 0x1.000002p+0f, "a sum rounded to nearest");
      }
    }
  });
#endif
}

const CaseTable kCases{
    {"mismatch_op-ws3",
     [] {
       disagreement_is_an_error_everywhere(3, kUsual, {.num_elems = 10, .op = ReduceOp::kMax});
     }},
    {"mismatch_dtype-ws2",
     [] {
       disagreement_is_an_error_everywhere(2, kUsual, {.num_elems = 10, .dtype = DType::kInt32});
     }},
    {"mismatch_num_elems-ws3",
     [] { disagreement_is_an_error_everywhere(3, kUsual, {.num_elems = 11}); }},
    {"mismatch_message_and_rounds-ws3",
     [] { disagreement_is_an_error_everywhere(3, kUsual, kUsualLong); }},
    {"mismatch_algorithm-ws2",
     [] {
       disagreement_is_an_error_everywhere(
           2, kUsualLong, {.num_elems = kLong, .algorithm = schedule::Algorithm::kRing});
     }},
    {"mismatch_root-ws3",
     [] {
       disagreement_is_an_error_everywhere(
           3, {.kind = CollectiveKind::kBroadcast, .num_elems = 9, .root = 0},
           {.kind = CollectiveKind::kBroadcast, .num_elems = 9, .root = 1});
     }},
    {"mismatch_kind-ws3",
     [] {
       disagreement_is_an_error_everywhere(3, {.kind = CollectiveKind::kBarrier}, kUsualLong);
     }},
    {"mismatch_writes_nothing-ws2", mismatch_writes_nothing},
    {"timeout_user_thread-ws3", [] { absent_peer_is_a_timeout(CallerThread::kUser); }},
    {"timeout_progress_thread-ws3", [] { absent_peer_is_a_timeout(CallerThread::kProgress); }},
    {"departed_peer_user_thread-ws3", [] { departed_peer_is_a_failure(CallerThread::kUser); }},
    {"departed_peer_progress_thread-ws3",
     [] { departed_peer_is_a_failure(CallerThread::kProgress); }},
    {"departure_behind_last_collective-ws4", departure_behind_last_collective_is_no_failure},
    {"abort_by_waiting_rank-ws3", [] { abort_ends_waits(0, CallerThread::kProgress); }},
    {"abort_by_awaited_rank-ws3", [] { abort_ends_waits(2, CallerThread::kUser); }},
    {"abort_at_any_moment-ws2", [] { abort_at_any_moment(2, 60); }},
    {"abort_at_any_moment-ws4", [] { abort_at_any_moment(4, 40); }},
    {"interruption_user_thread-ws2",
     [] { interruption_passes_and_peers_hear(CallerThread::kUser); }},
    {"interruption_of_peer_of_progress_thread-ws2",
     [] { interruption_passes_and_peers_hear(CallerThread::kProgress); }},
    {"progress_thread_not_interrupted-ws2", progress_thread_is_not_interrupted},
    {"plan_refuses", plan_refuses_what_cannot_be},
    {"plan_gpu_trees", plan_for_gpu_takes_trees_of_few_ranks},
    {"all_to_all_of_other_lengths-ws3", all_to_all_of_other_lengths_is_an_error_everywhere},
    {"call_words", call_survives_its_words},
    {"float_mode_of_caller-ws2", float_mode_of_caller_changes_nothing},
};

}  // namespace
}  // namespace rota::test
