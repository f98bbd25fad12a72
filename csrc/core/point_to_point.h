// Send and recv between two ranks of a group: any number outstanding, of any length, matched by
// source and tag in the order in which they were called, as in MPI (MPI-4.1, section 3.5).
//
// A rank that waits for one request moves the messages of all (core/message_queues.h): both ranks
// of a pair may send first, however much, because each takes in what the other sends while it waits
// for room. Requests that nobody waits for are moved by a thread that is borrowed for as long as
// there are any.
//
// A rank may send to itself. Such a send is done at once, since its message is kept until a recv
// asks for it.
//
// A forked child has a copy of this, of which every call throws Error(kInternal), and which ends at
// once: the links are its parent's.
//
// Works on pointers and dtypes; tensors are handled in tensor/.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/fork_safe.h"
#include "base/waiter.h"
#include "core/message_queues.h"
#include "core/progress_queue.h"
#include "core/watch.h"

namespace rota {

class Communicator;

class PointToPoint {
 public:
  using OnDone = std::function<void(const Request&)>;

  // communicator: owns this, and the others. check_interrupt: as Watch's.
  PointToPoint(Communicator& communicator, transport::Transport& transport,
               const std::function<void()>* check_interrupt);
  ~PointToPoint() { close(); }

  // Start a request, move what can be moved at once, and return without waiting. The memory must
  // stay valid until the request is done. on_done is called once, soon after that, inside any
  // thread's wait, also a collective's: it must not block. Throw Error(kValue) for a bad peer, and
  // a dead group's error.
  RequestRef send(const void* data, const Message& message, int peer, OnDone on_done = {});
  // With kAnyRank as peer, takes the first message with this tag from any rank.
  RequestRef recv(void* data, const Message& message, int peer, OnDone on_done = {});

  // Sends or receives, blocks until that is done, and returns the other rank. Throws like recv()
  // and wait(). Takes less time than these, because the request lies on the stack.
  int run(Direction direction, void* data, const Message& message, int peer, CallerThread thread);

  // Moves what can be moved at once, and returns whether the request is done.
  bool test(const Request& request);
  // Blocks until the request is done or `patience` is over, and returns whether it is done. Throws
  // the request's error: Error(kMismatch) if sender and receiver disagree, which leaves the group
  // alive; any other error ends the group. The group's timeout applies while no byte moves.
  bool wait(const Request& request, CallerThread thread,
            std::optional<Nanoseconds> patience = std::nullopt);
  // Lets a borrowed thread move the request while nobody waits for it; no timeout applies then.
  // owner keeps this object alive for that thread.
  void attend(const Request& request, std::shared_ptr<void> owner);

  // Moves what can be moved at once, and returns who has sent the first message with this tag that
  // no recv has asked for; none: nobody has.
  std::optional<int> probe(uint64_t tag);

  // Moves what can be moved at once in every group of this process. Every wait calls it now and
  // then, so that no peer is stuck on a full link of a group that this rank uses later.
  static void move_all_groups();

  // For what on_done must not do itself, because it may block: its tasks leave it at once.
  ProgressQueue& callbacks() { return callbacks_; }

  bool has_unfinished_sends();
  // Waits until all outgoing messages are in the links.
  void finish(CallerThread thread);
  // Fails all outstanding requests. Idempotent.
  void close();

 private:
  class Observer;

  using Done = MessageQueues::Done;
  using Lock = std::unique_lock<std::mutex>;

  // Throws what send() and recv() throw.
  void check_call(Direction direction, int peer) const;
  RequestRef start(Direction direction, void* data, const Message& message, int peer,
                   OnDone on_done);
  // Call it with mutex_ held.
  void start(const RequestRef& request, Done& done);
  // Waits until next_awaited(), which is called with mutex_ held, returns null in place of a
  // request, or `patience` is over. The lock is held at the call and afterwards, unless this throws
  // what a signal handler throws. Returns the error if one has ended the group meanwhile.
  template <typename NextAwaited>
  std::optional<Error> wait_while(const NextAwaited& next_awaited, Lock& lock, CallerThread thread,
                                  std::optional<Nanoseconds> patience, Done& done);
  // Runs body(done) with the lock held, fails the group if it throws, and reports.
  template <typename Body>
  void move_without_waiting(const Body& body);
  void attend_all();
  bool step_in(Lock& lock);

  // Fails the whole group; call it with mutex_ held.
  void fail(const Error& error, Done& done);
  // Fails all requests, and wakes the threads that wait for them; call it with mutex_ held.
  void end_all(const Error& error, Done& done);
  MessageQueues::AwaitedFlags awaited() const;
  // Call it with no lock held, because on_done may call back into this.
  static void report(const Done& done);

  Communicator& communicator_;
  const transport::Transport& transport_;
  const std::function<void()>* check_interrupt_;
  Waiter waiter_;
  WaitPolicy policy_;
  Flag ended_{};  // 1 once end_all() has run; the threads of this rank alone look at it

  std::mutex mutex_;  // guards all that follows
  MessageQueues queues_;
  uint64_t num_requests_ = 0;
  uint64_t num_waits_ = 0;  // begun so far
  int num_waiting_ = 0;     // threads in wait()
  bool is_attended_ = false;
  bool is_closing_ = false;
  ForkSafe<std::condition_variable> attendant_;  // wakes the borrowed thread when this closes
  ProgressQueue attendant_queue_;
  ProgressQueue callbacks_;
};

}  // namespace rota
