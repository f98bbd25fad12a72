// Endpoints created, connected and dropped by several threads at once, while the listener runs.
#include "transport/endpoint.h"

#include <thread>

#include "check.h"
#include "core/communicator.h"
#include "memory_store.h"
#include "ranks.h"
#include "transport/shared_memory.h"

namespace rota::test {
namespace {

using transport::SharedMemoryRank;

void connect_and_use(SharedMemoryRank& rank) {
  Communicator communicator(rank.connect(kPatience, [] {}), kPatience, [] {});
  communicator.barrier(CallerThread::kProgress);
}

// Sometimes the listener ends before the next rank starts; sometimes ranks share it.
void ranks_connect(int world_size) {
  for (int i = 0; i < 40; ++i) {
    MemoryStore store;
    run_threads(world_size, [&](int index) {
      SharedMemoryRank rank(store, index, world_size, kSmall);
      connect_and_use(rank);
    });
  }
}

void groups_connect_in_different_orders() {
  constexpr int kWorldSize = 3;
  for (int i = 0; i < 20; ++i) {
    MemoryStore stores[kWorldSize];
    run_threads(kWorldSize, [&](int index) {
      std::vector<std::unique_ptr<SharedMemoryRank>> ranks;
      for (MemoryStore& store : stores) {
        ranks.push_back(std::make_unique<SharedMemoryRank>(store, index, kWorldSize, kSmall));
      }
      std::vector<std::unique_ptr<Communicator>> communicators(kWorldSize);
      for (int turn = 0; turn < kWorldSize; ++turn) {
        const auto group = static_cast<size_t>((index + turn) % kWorldSize);
        communicators[group] = std::make_unique<Communicator>(
            ranks[group]->connect(kPatience, [] {}), kPatience, [] {});
      }
      for (const auto& communicator : communicators) {
        communicator->barrier(CallerThread::kProgress);
      }
    });
  }
}

// Rank 1 leaves before, during or after rank 0's handshake.
void rank_leaves_at_any_moment() {
  for (int i = 0; i < 100; ++i) {
    MemoryStore store;
    run_threads(2, [&](int index) {
      SharedMemoryRank rank(store, index, 2, kSmall);
      if (index == 1) {
        for (int pause = 0; pause < i; ++pause) std::this_thread::yield();
        return;
      }
      try {
        connect_and_use(rank);
        fail("the barrier ended without rank 1");
      } catch (const Error& error) {
        check(error.kind() == ErrorKind::kTransport || error.kind() == ErrorKind::kPeerFailed,
              error.what());
        check_contains(error.what(), "rank 1");
      }
    });
  }
}

const CaseTable kCases{
    {"rendezvous-ws2", ranks_connect, 2},
    {"rendezvous-ws5", ranks_connect, 5},
    {"rendezvous_groups-ws3", groups_connect_in_different_orders},
    {"rendezvous_leaver-ws2", rank_leaves_at_any_moment},
};

}  // namespace
}  // namespace rota::test
