// Send and recv between ranks that are threads: how messages are matched, in which order, and what
// becomes of messages that do not fit, are not received, or never come.
#include <sched.h>

#include <barrier>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "core/communicator.h"
#include "random.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;

constexpr size_t kCell = kSmall.cell_bytes;
constexpr uint64_t kNumCells = kSmall.num_cells;
constexpr size_t kLink = kNumCells * kCell;  // one rank's cells
// Zero, one, around a cell, around pieces, all cells of a rank, of both, many times that.
constexpr size_t kLengths[] = {
    0,     1,         kCell - 1,    kCell, kCell + 1, 4 * kCell - 1, 4 * kCell, 4 * kCell + 1,
    kLink, 2 * kLink, 9 * kLink + 7};

// The content of message `number` of `source`; any two differ from the first byte on.
Bytes content(int source, uint64_t number, size_t num_bytes) {
  Bytes bytes(num_bytes);
  uint64_t value = mix(number * 64 + static_cast<uint64_t>(source));
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(value >> 56);
    value = value * 0x5851f42d4c957f2d + 1;
  }
  return bytes;
}

Message message_of(const Bytes& bytes, uint64_t tag = 0) {
  return {.tag = tag, .dtype = DType::kUInt8, .num_elems = bytes.size()};
}

void send(Communicator& communicator, const Bytes& bytes, int peer, uint64_t tag = 0) {
  PointToPoint& links = communicator.point_to_point();
  const RequestRef request = links.send(bytes.data(), message_of(bytes, tag), peer);
  links.wait(*request, CallerThread::kUser);
}

// Returns the sender's rank.
int recv(Communicator& communicator, Bytes& bytes, int peer, uint64_t tag = 0) {
  PointToPoint& links = communicator.point_to_point();
  const RequestRef request = links.recv(bytes.data(), message_of(bytes, tag), peer);
  links.wait(*request, CallerThread::kUser);
  return request->peer();
}

void check_recv(Communicator& communicator, const Bytes& expected, int peer, uint64_t tag = 0) {
  Bytes bytes(expected.size(), 0xee);
  recv(communicator, bytes, peer, tag);
  check(bytes == expected, "another message has come");
}

void messages_of_all_lengths_arrive() {
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    uint64_t number = 0;
    for (int lap = 0; lap < 3; ++lap) {
      for (const size_t length : kLengths) {
        ++number;
        if (communicator.rank() == 0) send(communicator, content(0, number, length), peer);
        check_recv(communicator, content(peer, number, length), peer);
        if (communicator.rank() == 1) send(communicator, content(1, number, length), peer);
      }
    }
  });
}

// Rank 0 writes to each cell as soon as rank 1 has given it back. Its cells hold one message each.
template <size_t kLength>
void a_full_link_goes_on() {
  std::atomic<bool> is_full{false};
  run_ranks(2, [&](Communicator& communicator) {
    for (uint64_t number = 0; number < 100 * kNumCells; ++number) {
      const Bytes bytes = content(0, number, kLength);
      if (communicator.rank() == 0) {
        if (number == kNumCells) {
          is_full = true;
          is_full.notify_all();
        }
        send(communicator, bytes, 1);
      } else {
        is_full.wait(false);
        check_recv(communicator, bytes, 0);
      }
    }
  });
}

// Rank 1 sends in cells of its own, and in those of rank 0 that it has kept: half of them. Rank 0
// reads none of what it posts before the link is full.
void both_ranks_cells_are_full() {
  constexpr uint64_t kNumFitting = kNumCells + kNumCells / 2;
  std::barrier together(2);
  run_ranks(2, [&](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    if (communicator.rank() == 0) {
      for (uint64_t number = 0; number < kNumCells; ++number) {
        send(communicator, content(0, number, kCell), 1);
      }
      together.arrive_and_wait();
      for (uint64_t number = 0; number <= kNumFitting; ++number) {
        check_recv(communicator, content(1, number, kCell), 1);
      }
      return;
    }
    for (uint64_t number = 0; number < kNumCells; ++number) {
      check_recv(communicator, content(0, number, kCell), 0);
    }
    std::vector<Bytes> messages;
    std::vector<RequestRef> requests;
    for (uint64_t number = 0; number <= kNumFitting; ++number) {
      messages.push_back(content(1, number, kCell));
      requests.push_back(links.send(messages.back().data(), message_of(messages.back()), 0));
      check_equal(requests.back()->is_done(), number < kNumFitting, "is sent");
    }
    together.arrive_and_wait();
    links.wait(*requests.back(), CallerThread::kUser);
  });
}

// Sends far more than a link holds: each rank receives while it waits for room.
void both_ranks_send_first() {
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    for (uint64_t number = 0; number < 21; ++number) {
      const size_t length = 20 * kLink + number;
      send(communicator, content(communicator.rank(), number, length), peer);
      check_recv(communicator, content(peer, number, length), peer);
    }
  });
}

// Every rank sends to every other with a few tags, as isend does, and receives in random order.
// Messages of one (source, tag) must arrive in the order in which they were sent.
template <int kWorldSize>
void mixed_messages_keep_their_order() {
  constexpr uint64_t kNumMessages = 60, kNumTags = 3;
  run_ranks(kWorldSize, [](Communicator& communicator) {
    const int rank = communicator.rank();
    PointToPoint& links = communicator.point_to_point();
    const auto length_of = [](int source, int peer, uint64_t number) {
      const auto seed = number * 4096 + static_cast<uint64_t>(source * 64 + peer);
      return kLengths[mix(seed) % (std::size(kLengths) - 1)];
    };
    // The j-th message from `source` to `peer` has tag j % kNumTags.
    struct Expected {
      Bytes bytes, content;
      RequestRef request;
    };
    Random random(static_cast<uint64_t>(rank) + 77);
    std::vector<Bytes> sent;
    std::vector<RequestRef> sends;
    std::vector<Expected> recvs;
    recvs.reserve(kNumMessages * kWorldSize);
    std::vector<uint64_t> num_sent(kWorldSize, 0);
    // The number of the next message, by source and tag.
    std::vector<std::array<uint64_t, kNumTags>> next(kWorldSize, {0, 1, 2});
    sent.reserve(kNumMessages * kWorldSize);
    const uint64_t num_all = kNumMessages * (kWorldSize - 1);
    for (uint64_t num_sends = 0, num_recvs = 0; num_sends < num_all || num_recvs < num_all;) {
      if (random.below(8) == 0) sched_yield();
      const auto peer = static_cast<int>(random.below(kWorldSize));
      if (peer == rank) continue;
      if (random.below(2) == 0) {
        uint64_t& number = num_sent[static_cast<size_t>(peer)];
        if (number == kNumMessages) continue;
        sent.push_back(content(rank, number, length_of(rank, peer, number)));
        sends.push_back(
            links.send(sent.back().data(), message_of(sent.back(), number % kNumTags), peer));
        ++number, ++num_sends;
      } else {
        const uint64_t tag = random.below(kNumTags);
        uint64_t& number = next[static_cast<size_t>(peer)][tag];
        if (number >= kNumMessages) continue;
        Expected& expected = recvs.emplace_back();
        expected.content = content(peer, number, length_of(peer, rank, number));
        expected.bytes.resize(expected.content.size());
        expected.request = links.recv(expected.bytes.data(), message_of(expected.bytes, tag), peer);
        number += kNumTags, ++num_recvs;
      }
    }
    // The order does not matter, because each wait moves all messages.
    for (size_t i = recvs.size(); i-- > 0;) {
      links.wait(*recvs[i].request, CallerThread::kUser);
      check(recvs[i].bytes == recvs[i].content, "another message has come");
    }
    for (const RequestRef& request : sends) links.wait(*request, CallerThread::kUser);
  });
}

// What rank 1 has not asked for when its recv is done stays in the cells of rank 0, so rank 0
// waits.
void what_is_not_asked_for_stays_with_its_sender() {
  std::barrier together(2);
  run_ranks(2, [&](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    const Bytes first = content(0, 0, kCell), second = content(0, 1, kLink);
    if (communicator.rank() == 0) {
      send(communicator, first, 1);
      const RequestRef request = links.send(second.data(), message_of(second), 1);
      together.arrive_and_wait();
      together.arrive_and_wait();  // rank 1 has received the first
      check(!links.test(*request), "the second is longer than the link");
      together.arrive_and_wait();
      links.wait(*request, CallerThread::kUser);
      return;
    }
    together.arrive_and_wait();
    check_recv(communicator, first, 0);
    together.arrive_and_wait();
    together.arrive_and_wait();
    check_recv(communicator, second, 0);
  });
}

void any_rank_is_the_first_that_came() {
  constexpr int kWorldSize = 4;
  run_ranks(kWorldSize, [](Communicator& communicator) {
    constexpr uint64_t kNumMessages = 50;
    if (communicator.rank() > 0) {
      for (uint64_t number = 0; number < kNumMessages; ++number) {
        send(communicator, content(communicator.rank(), number, 300), 0, 5);
      }
      return;
    }
    std::vector<uint64_t> next(kWorldSize, 0);
    for (uint64_t i = 0; i < kNumMessages * (kWorldSize - 1); ++i) {
      Bytes bytes(300);
      const int source = recv(communicator, bytes, kAnyRank, 5);
      check(bytes == content(source, next[static_cast<size_t>(source)]++, 300), "out of order");
    }
  });
}

// Messages and collectives of one group do not wait for each other.
void messages_go_on_beside_collectives() {
  run_ranks(3, [](Communicator& communicator) {
    const int rank = communicator.rank(), next = (rank + 1) % 3, previous = (rank + 2) % 3;
    std::thread collectives([&] {
      for (int i = 0; i < 200; ++i) communicator.barrier(CallerThread::kProgress);
    });
    for (uint64_t number = 0; number < 50; ++number) {
      const Bytes own = content(rank, number, 3000);
      PointToPoint& links = communicator.point_to_point();
      const RequestRef request = links.send(own.data(), message_of(own), next);
      check_recv(communicator, content(previous, number, 3000), previous);
      links.wait(*request, CallerThread::kUser);
    }
    collectives.join();
  });
}

// Two threads of each rank wait for messages of their own, and each moves those of both.
void threads_share_the_links() {
  run_ranks(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    run_threads(2, [&](int thread) {
      const auto tag = static_cast<uint64_t>(thread);
      for (uint64_t number = 0; number < 100; ++number) {
        const size_t length = kLengths[number % std::size(kLengths)] % (2 * kLink);
        send(communicator, content(communicator.rank(), number * 2 + tag, length), peer, tag);
        check_recv(communicator, content(peer, number * 2 + tag, length), peer, tag);
      }
    });
  });
}

// Rank 0 sends more than the link holds, then ignores the link until rank 1 has received it all.
void requests_go_on_while_nobody_waits() {
  std::atomic<bool> has_arrived{false}, is_reported{false};
  run_ranks(2, [&](Communicator& communicator) {
    const Bytes bytes = content(0, 1, 50 * kLink);
    if (communicator.rank() == 1) {
      check_recv(communicator, bytes, 0);
      has_arrived = true;
      has_arrived.notify_all();
      return;
    }
    PointToPoint& links = communicator.point_to_point();
    const RequestRef request = links.send(bytes.data(), message_of(bytes), 1, [&](const Request&) {
      is_reported = true;
      is_reported.notify_all();
    });
    links.attend(*request, nullptr);
    has_arrived.wait(false);
    check(links.test(*request), "the send is done");
    is_reported.wait(false);  // set by the thread that moved it, once it has released the mutex
  });
}

void another_length_or_dtype_is_a_mismatch() {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    for (const size_t length : {size_t{3}, 3 * kLink}) {
      Bytes bytes = content(0, 1, length);
      if (communicator.rank() == 0) {
        send(communicator, bytes, 1, 8);
        send(communicator, bytes, 1, 8);
        continue;
      }
      Bytes longer(length + 1, 0xee);
      const RequestRef request = links.recv(longer.data(), message_of(longer, 8), 0);
      const Error error =
          expect_error(ErrorKind::kMismatch, [&] { links.wait(*request, CallerThread::kUser); });
      check_contains(error.what(), join("rank 0 called send(uint8[", length, "], tag 8)"));
      check_contains(error.what(), join("rank 1 called recv(uint8[", length + 1, "], tag 8)"));
      check(longer == Bytes(length + 1, 0xee), "something was written");
      const RequestRef other =
          links.recv(bytes.data(), {.tag = 8, .dtype = DType::kInt8, .num_elems = length}, 0);
      expect_error(ErrorKind::kMismatch, [&] { links.wait(*other, CallerThread::kUser); });
    }
    communicator.barrier(CallerThread::kUser);  // the group stays usable
  });
}

void a_peer_that_is_none_is_refused() {
  run_ranks(2, [](Communicator& communicator) {
    Bytes bytes(1);
    for (const int peer : {-2, communicator.rank(), 2}) {
      const Error error = expect_error(ErrorKind::kValue, [&] { recv(communicator, bytes, peer); });
      check_contains(error.what(), join("the peer is ", peer));
    }
    expect_error(ErrorKind::kValue, [&] { send(communicator, bytes, kAnyRank); });
  });
}

RanksOptions with_timeout(milliseconds timeout) { return {.timeout = timeout}; }

void a_send_that_nobody_receives_names_who_was_awaited() {
  std::atomic<bool> is_closed{false}, is_over{false};
  run_ranks(
      2,
      [&](Communicator& communicator) {
        if (communicator.rank() == 1) {
          // Ranks share this process, where a waiting thread moves the messages of all groups.
          communicator.point_to_point().close();
          is_closed = true;
          is_closed.notify_all();
          return is_over.wait(false);
        }
        is_closed.wait(false);
        const Error error = expect_error(
            ErrorKind::kTimeout, [&] { send(communicator, content(0, 1, 2 * kLink), 1, 3); });
        check_contains(error.what(), "rota.send: rank 0/2 waited");
        check_contains(error.what(), "for rank 1");
        check_contains(error.what(), "tag 3");
        // The error that ended the group also ends later calls and outstanding requests.
        Bytes bytes(1);
        expect_error(ErrorKind::kTimeout, [&] { recv(communicator, bytes, 1); });
        is_over = true;
        is_over.notify_all();
      },
      with_timeout(milliseconds(300)));
}

void a_recv_for_which_nothing_comes_times_out() {
  std::atomic<int> num_over{0};
  run_ranks(
      3,
      [&](Communicator& communicator) {
        if (communicator.rank() != 1) {
          Bytes bytes(1);
          const bool is_any = communicator.rank() == 0;
          const Error error = expect_error(
              ErrorKind::kTimeout, [&] { recv(communicator, bytes, is_any ? kAnyRank : 1); });
          check_contains(error.what(), "waited");
          ++num_over;
        } else {
          while (num_over < 2) std::this_thread::sleep_for(milliseconds(1));
        }
      },
      with_timeout(milliseconds(300)));
}

void a_wait_may_be_given_up() {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    if (communicator.rank() == 0) {
      communicator.barrier(CallerThread::kUser);
      return send(communicator, Bytes{7}, 1);
    }
    Bytes bytes(1);
    const RequestRef request = links.recv(bytes.data(), message_of(bytes), 0);
    check(!links.wait(*request, CallerThread::kUser, milliseconds(20)), "nothing has been sent");
    check(!links.test(*request), "nothing has been sent");
    communicator.barrier(CallerThread::kUser);
    check(links.wait(*request, CallerThread::kUser), "it has been sent");
    check(bytes[0] == 7, "another message has come");
  });
}

// Messages that it sent before it left can still be received.
void a_rank_that_leaves_is_not_waited_for() {
  run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 0) return send(communicator, Bytes{1, 2, 3}, 1);
    while (!communicator.transport().region(0).control().departed.load()) sched_yield();
    check_recv(communicator, {1, 2, 3}, 0);
    Bytes bytes(3);
    const Error error = expect_error(ErrorKind::kPeerFailed, [&] { recv(communicator, bytes, 0); });
    check_contains(error.what(), "rank 0 (a thread) has left the group");
  });
}

// Nobody waits for the request, so the thread that attends to it must notice.
void a_rank_that_leaves_ends_what_is_attended() {
  run_ranks(3, [](Communicator& communicator) {
    if (communicator.rank() != 1) return communicator.barrier(CallerThread::kUser);
    PointToPoint& links = communicator.point_to_point();
    Bytes bytes(1);
    std::atomic<bool> is_reported{false};
    const RequestRef request = links.recv(bytes.data(), message_of(bytes), 2, [&](const Request&) {
      is_reported = true;
      is_reported.notify_all();
    });
    links.attend(*request, nullptr);
    communicator.barrier(CallerThread::kUser);
    is_reported.wait(false);
    check(request->error() && request->error()->kind() == ErrorKind::kPeerFailed, "it has failed");
    check_contains(request->error()->what(), "rank 2 (a thread) has left the group");
  });
}

void an_abort_ends_every_wait() {
  run_ranks(3, [](Communicator& communicator) {
    if (communicator.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(20));
      return communicator.abort("on purpose");
    }
    Bytes bytes(1);
    const Error error = expect_error(ErrorKind::kPeerFailed, [&] {
      recv(communicator, bytes, communicator.rank() == 1 ? kAnyRank : 1);
    });
    check_contains(error.what(), "on purpose");
  });
}

// Rank 1 fails in the middle of a message, of which the rest comes later. It waits only when the
// group has failed, because a wait that lasts would also move the other rank's message.
void the_rest_of_a_failed_message_is_dropped() {
  std::barrier together(2);
  run_ranks(2, [&](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    Bytes bytes(kLink + 4 * kCell);
    if (communicator.rank() == 0) {
      const RequestRef request = links.send(bytes.data(), message_of(bytes), 1);
      check(!request->is_done(), "the link is full");
      together.arrive_and_wait();
      together.arrive_and_wait();  // rank 1 has taken what was in the link
      communicator.abort("on purpose");
      together.arrive_and_wait();
      together.arrive_and_wait();  // rank 1 has failed
      check(links.test(*request), "the rest is in the link");
      together.arrive_and_wait();
    } else {
      together.arrive_and_wait();
      const RequestRef request = links.recv(bytes.data(), message_of(bytes), 0);
      together.arrive_and_wait();
      together.arrive_and_wait();
      expect_error(ErrorKind::kPeerFailed, [&] { links.wait(*request, CallerThread::kUser); });
      together.arrive_and_wait();
      together.arrive_and_wait();
      PointToPoint::move_all_groups();
      check_contains(request->error()->what(), "on purpose");
    }
  });
}

void closing_ends_what_is_outstanding() {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& links = communicator.point_to_point();
    Bytes bytes(1);
    bool is_reported = false;
    const RequestRef request = links.recv(bytes.data(), message_of(bytes), kAnyRank,
                                          [&](const Request&) { is_reported = true; });
    links.attend(*request, nullptr);
    links.close();
    check(request->is_done() && request->error() && is_reported, "the recv was given up");
    links.close();
  });
}

const CaseTable kCases{
    {"p2p_lengths", messages_of_all_lengths_arrive},
    {"p2p_full-short", a_full_link_goes_on<1>},
    {"p2p_full-long", a_full_link_goes_on<kCell>},
    {"p2p_full-both", both_ranks_cells_are_full},
    {"p2p_both_first", both_ranks_send_first},
    {"p2p_mixed-ws2", mixed_messages_keep_their_order<2>},
    {"p2p_mixed-ws4", mixed_messages_keep_their_order<4>},
    {"p2p_unasked", what_is_not_asked_for_stays_with_its_sender},
    {"p2p_any_rank", any_rank_is_the_first_that_came},
    {"p2p_beside_collectives", messages_go_on_beside_collectives},
    {"p2p_threads", threads_share_the_links},
    {"p2p_attended", requests_go_on_while_nobody_waits},
    {"p2p_mismatch", another_length_or_dtype_is_a_mismatch},
    {"p2p_bad_peer", a_peer_that_is_none_is_refused},
    {"p2p_send_timeout", a_send_that_nobody_receives_names_who_was_awaited},
    {"p2p_recv_timeout", a_recv_for_which_nothing_comes_times_out},
    {"p2p_given_up", a_wait_may_be_given_up},
    {"p2p_departure", a_rank_that_leaves_is_not_waited_for},
    {"p2p_departure_attended", a_rank_that_leaves_ends_what_is_attended},
    {"p2p_abort", an_abort_ends_every_wait},
    {"p2p_failed_message", the_rest_of_a_failed_message_is_dropped},
    {"p2p_close", closing_ends_what_is_outstanding},
};

}  // namespace
}  // namespace rota::test
