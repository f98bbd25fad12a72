// Long random sequences of collectives, so that every kind follows every other at every size, with
// ranks late in turn. Slots, posts and flags carry over from one collective to the next.
#include "calls.h"
#include "check.h"
#include "ranks.h"

namespace rota::test {
namespace {

// node_size: of most sums, which go in two levels; 0: of none.
void mixed_calls(int world_size, uint64_t num_calls, int node_size) {
  run_ranks(world_size, [&](Communicator& communicator) {
    Random same_on_all_ranks(node_size == 0 ? world_size : node_size);
    Random own(1000 + communicator.rank());
    for (uint64_t i = 0; i < num_calls; ++i) {
      TestCall call = random_call(same_on_all_ranks, communicator.world_size());
      const bool sums = call.kind == CollectiveKind::kAllReduce ||
                        call.kind == CollectiveKind::kReduceBucket ||
                        call.kind == CollectiveKind::kReduce;
      if (node_size != 0 && sums && same_on_all_ranks.below(3) > 0) {
        call.algorithm.reset();
        call.hop.reset();
        call.node_size = node_size;
      }
      dawdle(own);
      call_and_check(communicator, call, i,
                     own.below(2) == 0 ? CallerThread::kUser : CallerThread::kProgress);
    }
  });
}

// Like mixed_calls, for worlds in which narrow floats no longer hold every sum: each algorithm in
// turn, through more rounds than there are slots.
void every_algorithm(int world_size, uint64_t num_turns) {
  run_ranks(world_size, [&](Communicator& communicator) {
    Random own(communicator.rank());
    for (uint64_t i = 0; i < num_turns; ++i) {
      std::vector<TestCall> calls{
          {.kind = CollectiveKind::kBroadcast, .root = static_cast<int>(i) % world_size},
          {.kind = CollectiveKind::kAllGather}};
      for (const schedule::Algorithm algorithm : kAlgorithms) {
        calls.push_back({.algorithm = algorithm});
      }
      for (TestCall& call : calls) {
        call.num_elems = 3 * kSmall.slot_bytes / 4 + i;
        dawdle(own);
        call_and_check(communicator, call, i);
      }
    }
  });
}

// Nothing but sleeping and waking: no rank ever spins or yields, and none is late.
void calls_that_always_sleep(int world_size, uint64_t num_calls) {
  run_ranks(world_size, [&](Communicator& communicator) {
    for (uint64_t i = 0; i < num_calls; ++i) {
      const bool is_short = i % 4 != 0;
      call_and_check(
          communicator,
          {.num_elems = is_short ? uint64_t{7} : uint64_t{3000},
           .algorithm = is_short ? schedule::Algorithm::kOneShot : kAlgorithms[i / 4 % 4]},
          i, CallerThread::kProgress);
    }
  });
}

// The longest message of every epoch: the two mailboxes take turns without a byte to spare.
void longest_messages(int world_size, uint64_t num_calls) {
  run_ranks(world_size, [&](Communicator& communicator) {
    Random own(communicator.rank());
    for (uint64_t i = 0; i < num_calls; ++i) {
      dawdle(own);
      const bool reduces = i % 3 != 2;
      call_and_check(communicator,
                     {.kind = reduces ? CollectiveKind::kAllReduce : CollectiveKind::kAllGather,
                      .num_elems = kSmall.message_bytes / 4 - i % 2,
                      .algorithm = schedule::Algorithm::kOneShot},
                     i, CallerThread::kProgress);
    }
  });
}

// Sometimes one rank's call is longer than the others'. All ranks refuse it, and go on with slots,
// mailboxes and flags as they were.
void mixed_calls_with_mismatches(int world_size, uint64_t num_calls) {
  run_ranks(world_size, [&](Communicator& communicator) {
    Random same_on_all_ranks(77);
    Random own(2000 + communicator.rank());
    for (uint64_t i = 0; i < num_calls; ++i) {
      TestCall call = random_call(same_on_all_ranks, communicator.world_size());
      const int odd_rank = same_on_all_ranks.below(3 * world_size);
      const bool fits = odd_rank >= world_size || call.kind == CollectiveKind::kBarrier;
      if (odd_rank == communicator.rank()) call.num_elems += fits ? 0 : 1;
      dawdle(own);
      const auto make_call = [&] {
        call_and_check(communicator, call, i, CallerThread::kProgress);
      };
      if (fits) {
        make_call();
      } else {
        expect_error(ErrorKind::kMismatch, make_call);
      }
    }
  });
}

// Several threads of each rank share its communicator; all calls are alike, so any order will do.
void calls_from_several_threads(int world_size, const TestCall& call, uint64_t num_calls) {
  run_ranks(world_size, [&](Communicator& communicator) {
    run_threads(3, [&](int thread) {
      for (uint64_t i = 0; i < num_calls; ++i) {
        call_and_check(communicator, call, /*seed=*/5,
                       thread == 0 ? CallerThread::kUser : CallerThread::kProgress);
      }
    });
  });
}

const CaseTable kCases{
    {"mixed_calls-ws1", mixed_calls, 1, 300, 0},
    {"mixed_calls-ws2", mixed_calls, 2, 1500, 0},
    {"mixed_calls-ws3", mixed_calls, 3, 2000, 0},
    {"mixed_calls-ws4", mixed_calls, 4, 700, 0},
    {"mixed_calls-ws5", mixed_calls, 5, 400, 0},
    {"mixed_calls-ws8", mixed_calls, 8, 200, 0},
    {"two_level_mixed-2x2", mixed_calls, 4, 600, 2},
    {"two_level_mixed-2x3", mixed_calls, 6, 400, 3},
    {"two_level_mixed-4x2", mixed_calls, 8, 200, 2},
    {"every_algorithm-ws16", every_algorithm, 16, 3},
    {"every_algorithm-ws64", every_algorithm, 64, 1},
    {"sleeping_calls-ws2", calls_that_always_sleep, 2, 2000},
    {"sleeping_calls-ws4", calls_that_always_sleep, 4, 1000},
    {"longest_messages-ws2", longest_messages, 2, 1500},
    {"longest_messages-ws4", longest_messages, 4, 500},
    {"mixed_calls_with_mismatches-ws3", mixed_calls_with_mismatches, 3, 1000},
    {"calls_from_several_threads-ws2-short", calls_from_several_threads, 2,
     TestCall{.num_elems = 9}, 400},
    {"calls_from_several_threads-ws2-long", calls_from_several_threads, 2,
     TestCall{.num_elems = 5000}, 100},
};

}  // namespace
}  // namespace rota::test
