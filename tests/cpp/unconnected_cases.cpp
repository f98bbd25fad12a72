// Ranks that connect to their peers later than they make the group, or never: what the idle ones
// hold, and what the others hear of them.
#include <chrono>
#include <memory>
#include <optional>

#include "check.h"
#include "core/communicator.h"
#include "open_files.h"
#include "processes.h"
#include "ranks.h"
#include "transport/bootstrap.h"
#include "transport/shared_memory.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;
using transport::SharedMemoryRank;
using transport::UniqueFd;

SharedMemoryRank make_rank(FileStore& store, int rank) { return {store, rank, 2, kSmall}; }

std::unique_ptr<Communicator> connect_now(SharedMemoryRank& rank) {
  return std::make_unique<Communicator>(rank.connect(kPatience, [] {}), kPatience, [] {});
}

// Rank 0 connects and sends while rank 1 is idle, and has left by the time rank 1 connects.
void idle_rank_is_connected_to() {
  run_processes(2, [](int index, FileStore& store) {
    SharedMemoryRank rank = make_rank(store, index);
    std::byte byte{42};
    const Message message{.tag = 0, .dtype = DType::kUInt8, .num_elems = 1};
    if (index == 0) {
      const auto communicator = connect_now(rank);
      communicator->point_to_point().send(&byte, message, 1);
      store.set("sent");
      return;
    }
    store.await("sent");
    byte = {};
    const auto communicator = connect_now(rank);
    PointToPoint& links = communicator->point_to_point();
    links.wait(*links.recv(&byte, message, 0), CallerThread::kUser);
    check(byte == std::byte{42}, "the message that was sent before this rank connected");
  });
}

void rank_that_leaves_unconnected_has_left() {
  run_processes(2, [](int index, FileStore& store) {
    std::optional<SharedMemoryRank> rank(std::in_place, store, index, 2, kSmall);
    if (index == 1) {
      store.await("connected");
      rank.reset();
      store.set("left");
      store.await("end");
      return;
    }
    const auto communicator = connect_now(*rank);
    store.set("connected");
    expect_error(ErrorKind::kPeerFailed, [&] { communicator->barrier(CallerThread::kUser); },
                 {"rank 1", "has left the group"});
    store.await("left");
    store.set("end");
  });
}

void rank_that_has_left_is_named() {
  run_processes(2, [](int index, FileStore& store) {
    std::optional<SharedMemoryRank> rank(std::in_place, store, index, 2, kSmall);
    // Keeps the process's listener running, for another group.
    const SharedMemoryRank other = make_rank(store, index);
    if (index == 1) {
      rank.reset();
      store.set("left");
      store.await("end");
      return;
    }
    store.await("left");
    expect_error(ErrorKind::kTransport, [&] { rank->connect(kPatience, [] {}); },
                 {"rank 1 has left the group"});
    store.set("end");
  });
}

// Rank 1 lacks memory when rank 0 connects to it, although it does not use the group itself.
void rank_without_memory_refuses() {
  run_processes(2, [](int index, FileStore& store) {
    if (index == 1) {
      const transport::Bootstrap bootstrap(store, 1, 2, kSmall, []() -> UniqueFd {
        throw Error(ErrorKind::kTransport, "rota: there is no memory");
      });
      store.await("refused");
      return;
    }
    SharedMemoryRank rank = make_rank(store, index);
    const int num_files = num_open_files();
    expect_error(ErrorKind::kTransport, [&] { rank.connect(kPatience, [] {}); },
                 {"rank 1 refused the handshake: rota: there is no memory"});
    check_num_open_files(num_files + 1, "descriptors: the own memory");
    store.set("refused");
  });
}

// Rank 0 makes a group anew over the same store while rank 1 still has the first one.
void group_made_again_waits_for_the_peer_to_make_it_again() {
  run_processes(2, [](int index, FileStore& store) {
    std::optional<SharedMemoryRank> first(std::in_place, store, index, 2, kSmall);
    if (index == 1) store.await("used");
    first.reset();
    SharedMemoryRank second = make_rank(store, index);
    if (index == 0) {
      expect_error(
          ErrorKind::kTransport, [&] { second.connect(milliseconds(100), [] {}); },
          {"still waits for rank 1 to make this group, after 0.1 s: does it make the same"});
      store.set("used");
    }
    connect_now(second)->barrier(CallerThread::kUser);
  });
}

void forked_child_drops_an_unconnected_rank() {
  run_processes(2, [](int index, FileStore& store) {
    std::optional<SharedMemoryRank> rank(std::in_place, store, index, 2, kSmall);
    check_child([&] { rank.reset(); });
    connect_now(*rank)->barrier(CallerThread::kUser);
  });
}

const CaseTable kCases{
    {"unconnected_idle", idle_rank_is_connected_to},
    {"unconnected_leaves", rank_that_leaves_unconnected_has_left},
    {"unconnected_has_left", rank_that_has_left_is_named},
    {"unconnected_without_memory", rank_without_memory_refuses},
    {"bootstrap_made_again", group_made_again_waits_for_the_peer_to_make_it_again},
    {"unconnected_forked", forked_child_drops_an_unconnected_rank},
};

}  // namespace
}  // namespace rota::test
