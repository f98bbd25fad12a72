// Send and recv between ranks that are threads: how messages are matched, in which order, and what
// becomes of messages that do not fit or have not been asked for.
#include <sched.h>

#include <atomic>
#include <barrier>
#include <latch>
#include <thread>
#include <vector>

#include "check.h"
#include "core/communicator.h"
#include "messages.h"
#include "random.h"
#include "ranks.h"

namespace rota::test {
namespace {

// Zero, one, around a cell, around chunks, all cells of a rank, of both, many times that.
constexpr size_t kLengths[] = {
    0,     1,         kCell - 1,    kCell, kCell + 1, 4 * kCell - 1, 4 * kCell, 4 * kCell + 1,
    kLink, 2 * kLink, 9 * kLink + 7};

// Rank 0 writes to each cell as soon as rank 1 has given it back. Its cells hold one message each.
void a_full_link_goes_on(size_t length) {
  std::latch is_full(1);
  run_ranks(2, [&](Communicator& communicator) {
    for (uint64_t number = 0; number < 100 * kNumCells; ++number) {
      const Bytes bytes = content(0, number, length);
      if (communicator.rank() == 0) {
        if (number == kNumCells) is_full.count_down();
        send(communicator, bytes, 1);
      } else {
        is_full.wait();
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

// Every rank sends to all, itself included, with a few tags, as isend does, and receives in random
// order.
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
    Random random(rank + 77);
    std::vector<Bytes> sent;
    std::vector<RequestRef> sends;
    std::vector<Expected> recvs;
    constexpr uint64_t kNumAll = kNumMessages * kWorldSize;
    recvs.reserve(kNumAll);
    std::vector<uint64_t> num_sent(kWorldSize, 0);
    // The number of the next message, by source and tag.
    std::vector<std::array<uint64_t, kNumTags>> next(kWorldSize, {0, 1, 2});
    sent.reserve(kNumAll);
    for (uint64_t num_sends = 0, num_recvs = 0; num_sends < kNumAll || num_recvs < kNumAll;) {
      if (random.below(8) == 0) sched_yield();
      const auto peer = random.below(kWorldSize);
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
  std::latch is_reported(1);
  std::latch has_arrived(1);
  run_ranks(2, [&](Communicator& communicator) {
    const Bytes bytes = content(0, 1, 50 * kLink);
    if (communicator.rank() == 1) {
      check_recv(communicator, bytes, 0);
      has_arrived.count_down();
      return;
    }
    PointToPoint& links = communicator.point_to_point();
    const RequestRef request = links.send(bytes.data(), message_of(bytes), 1,
                                          [&](const Request&) { is_reported.count_down(); });
    links.attend(*request, nullptr);
    has_arrived.wait();
    check(links.test(*request), "the send is done");
    is_reported.wait();  // set by the thread that moved it, once it has released the mutex
  });
}

// The send's request lies on the stack of the thread that waits for it.
void finishing_waits_for_a_send_of_another_thread() {
  std::barrier together(2);
  run_ranks(2, [&](Communicator& communicator) {
    const Bytes bytes = content(0, 1, 9 * kLink);
    if (communicator.rank() == 1) {
      together.arrive_and_wait();
      return check_recv(communicator, bytes, 0);
    }
    PointToPoint& links = communicator.point_to_point();
    std::atomic<bool> is_sent{false};
    std::thread sender([&] {
      send(communicator, bytes, 1);
      is_sent = true;
    });
    while (!links.has_unfinished_sends() && !is_sent) sched_yield();
    together.arrive_and_wait();
    links.finish(CallerThread::kUser);
    check(!links.has_unfinished_sends(), "all has been sent");
    sender.join();
  });
}

// Whoever sleeps on the links is woken, with the end of its request as the only sign.
void closing_wakes_whoever_waits() {
  std::barrier together(2);
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      std::thread waiting([&] {
        Bytes bytes(10);
        expect_error(ErrorKind::kInternal, [&] { recv(communicator, bytes, 1); });
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // mostly enough to fall asleep
      communicator.point_to_point().close();
      waiting.join();
    }
    together.arrive_and_wait();
  });
}

const CaseTable kCases{
    {"p2p_full-short", a_full_link_goes_on, 1},
    {"p2p_full-long", a_full_link_goes_on, kCell},
    {"p2p_full-both", both_ranks_cells_are_full},
    {"p2p_both_first", both_ranks_send_first},
    {"p2p_mixed-ws2", mixed_messages_keep_their_order<2>},
    {"p2p_mixed-ws4", mixed_messages_keep_their_order<4>},
    {"p2p_unasked", what_is_not_asked_for_stays_with_its_sender},
    {"p2p_any_rank", any_rank_is_the_first_that_came},
    {"p2p_beside_collectives", messages_go_on_beside_collectives},
    {"p2p_threads", threads_share_the_links},
    {"p2p_finish", finishing_waits_for_a_send_of_another_thread},
    {"p2p_attended", requests_go_on_while_nobody_waits},
    {"p2p_closed", closing_wakes_whoever_waits},
};

}  // namespace
}  // namespace rota::test
