// Sends and recvs between ranks that are threads, which end without their message: of a mismatch, a
// timeout, a rank that leaves, an abort, or because they are given up.

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "check.h"
#include "core/communicator.h"
#include "messages.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;

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
      expect_error(ErrorKind::kMismatch, [&] { links.wait(*request, CallerThread::kUser); },
                   {join("rank 0 called send(uint8[", length, "], tag 8)"),
                    join("rank 1 called recv(uint8[", length + 1, "], tag 8)")});
      check(longer == Bytes(length + 1, 0xee), "something was written");
      const RequestRef other =
          links.recv(bytes.data(), {.tag = 8, .dtype = DType::kInt8, .num_elems = length}, 0);
      expect_error(ErrorKind::kMismatch, [&] { links.wait(*other, CallerThread::kUser); });
    }
    communicator.barrier(CallerThread::kUser);  // the group stays usable
  });
}

void a_recv_for_which_nothing_comes_times_out() {
  std::atomic<int> num_over{0};
  run_ranks(3,
            [&](Communicator& communicator) {
              if (communicator.rank() != 1) {
                Bytes bytes(1);
                const bool is_any = communicator.rank() == 0;
                expect_error(ErrorKind::kTimeout,
                             [&] { recv(communicator, bytes, is_any ? kAnyRank : 1); }, {"waited"});
                ++num_over;
              } else {
                while (num_over < 2) std::this_thread::sleep_for(milliseconds(1));
              }
            },
            {.timeout = milliseconds(300)});
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
    expect_error(ErrorKind::kPeerFailed,
                 [&] { recv(communicator, bytes, communicator.rank() == 1 ? kAnyRank : 1); },
                 {"on purpose"});
  });
}

// Rank 1 takes no part, since a signal would end its waits, too.
void a_signal_ends_a_wait_and_the_group() {
  struct Signal {};
  std::barrier together(2);
  run_ranks(2,
            [&](Communicator& communicator) {
              if (communicator.rank() == 1) return together.arrive_and_wait();
              Bytes bytes(1);
              bool has_come = false;
              try {
                recv(communicator, bytes, 1, 7);
              } catch (const Signal&) {
                has_come = true;
              }
              check(has_come, "the handler's exception passes through");
              expect_error(ErrorKind::kInternal, [&] { recv(communicator, bytes, 1, 7); },
                           {"rota.recv: rank 0/2 was interrupted (epoch 1, tag 7, step 0)"});
              together.arrive_and_wait();
            },
            {.check_interrupt = [] { throw Signal(); }});
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
    {"p2p_mismatch", another_length_or_dtype_is_a_mismatch},
    {"p2p_recv_timeout", a_recv_for_which_nothing_comes_times_out},
    {"p2p_signal", a_signal_ends_a_wait_and_the_group},
    {"p2p_departure_attended", a_rank_that_leaves_ends_what_is_attended},
    {"p2p_abort", an_abort_ends_every_wait},
    {"p2p_failed_message", the_rest_of_a_failed_message_is_dropped},
    {"p2p_close", closing_ends_what_is_outstanding},
};

}  // namespace
}  // namespace rota::test
