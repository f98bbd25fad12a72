// Send and recv between two ranks of a group: any number outstanding, of any length, matched by
// source and tag in the order in which they were called, as in MPI (MPI-4.1, section 3.5).
//
// A message is a header and its elements, cut into as many messages of a link as it takes. A rank
// that waits for one request moves the messages of all: both ranks of a pair may send first,
// however much, because each takes in what the other sends while it waits for room. What arrives
// before it is asked for is kept on the heap, without a limit: beyond any limit, ranks that both
// send first, or a collective behind a send, would wait for each other forever. A rank that waits
// for nothing takes nothing in, so that its senders wait for free slots. Requests that nobody waits
// for are moved by a thread that is borrowed for as long as there are any.
//
// Works on pointers and dtypes; tensors are handled in tensor/.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/fork_safe.h"
#include "base/limits.h"
#include "base/waiter.h"
#include "core/progress_queue.h"
#include "core/watch.h"
#include "cpu/copy.h"
#include "transport/links.h"

namespace rota {

class Communicator;

enum class Direction { kSend, kRecv };
constexpr std::string_view name(Direction direction) {
  return direction == Direction::kSend ? "send" : "recv";
}

// What sender and receiver must agree on.
struct Message {
  uint64_t tag;
  DType dtype;
  uint64_t num_elems;

  uint64_t num_bytes() const { return num_elems * info(dtype).num_bytes; }
  bool operator==(const Message&) const = default;
};

// One send or recv, from its call until it is done.
class Request {
 public:
  bool is_done() const { return is_done_.load(std::memory_order_acquire); }
  // Valid once done: the failure, if any, and the other rank.
  const std::optional<Error>& error() const { return error_; }
  int peer() const { return peer_; }

 private:
  friend class PointToPoint;

  Direction direction_ = Direction::kSend;
  int peer_ = 0;  // kAnyRank until a message matches
  Message message_{};
  std::byte* data_ = nullptr;
  uint64_t num_moved_ = 0;                            // bytes
  uint64_t number_ = 0;                               // among the requests of this rank, from 1
  std::atomic<Nanoseconds> moved_at_{Nanoseconds()};  // when a part of it moved last
  std::function<void(const Request&)> on_done_;
  std::optional<Error> error_;  // set before is_done_, constant afterwards
  std::atomic<bool> is_done_{false};
};
using RequestRef = std::shared_ptr<Request>;

class PointToPoint {
 public:
  using OnDone = std::function<void(const Request&)>;

  // communicator: owns this, and the transport.
  PointToPoint(Communicator& communicator, transport::Transport& transport,
               std::function<void()> check_interrupt);
  ~PointToPoint() { close(); }

  // Start a request, move what can be moved at once, and return without waiting. The memory must
  // stay valid until the request is done. on_done is called once, soon after that, on any thread
  // and with no lock held. Throw Error(kValue) for a bad peer, and a dead group's error.
  RequestRef send(const void* data, const Message& message, int peer, OnDone on_done = {});
  // With kAnyRank as peer, takes the first message with this tag from any rank.
  RequestRef recv(void* data, const Message& message, int peer, OnDone on_done = {});

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

  // Moves what can be moved at once in every group of this process. Every wait calls it now and
  // then, so that no peer is stuck on a full link of a group that this rank uses later.
  static void move_all_groups();

  bool has_unfinished_sends();
  // Waits until all outgoing messages are in the links.
  void finish(CallerThread thread);
  // Fails all outstanding requests. Idempotent.
  void close();

 private:
  // A message that came before its recv.
  struct Early {
    int source;
    Message message;
    std::unique_ptr<std::byte[]> data;
    bool is_whole = false;
    RequestRef taken_by;  // a recv that came while the message was still arriving
  };
  // A message that a link has received in part.
  struct Arriving {
    bool is_begun = false;
    uint64_t piece_bytes = 0;
    uint64_t num_bytes_left = 0;
    RequestRef recv;               // one of these two
    std::shared_ptr<Early> early;  //
    std::byte* data = nullptr;     // where the next bytes go; null: they are dropped
    cpu::OutputCopier copier{0, 1};
  };
  // The flags to wait for: on the stack, because waits for short messages are frequent.
  class AwaitedFlags {
   public:
    void add(const Awaited& flag) { flags_[num_flags_++] = flag; }
    std::span<const Awaited> all() const { return {flags_.data(), num_flags_}; }

   private:
    static_assert(2 * kMaxWorldSize <= Waiter::kMaxAwaited);
    std::array<Awaited, 2 * kMaxWorldSize> flags_;
    size_t num_flags_ = 0;
  };
  class Observer;

  bool wait_until_done(const Request& request, CallerThread thread,
                       std::optional<Nanoseconds> patience);
  void attend_all();
  bool step_in(std::unique_lock<std::mutex>& lock);
  RequestRef start(Direction direction, void* data, const Message& message, int peer,
                   OnDone on_done);

  // Call these with mutex_ held. They append finished requests to `done`, to be reported after the
  // mutex is released, because on_done may call back into this.
  using Done = std::vector<RequestRef>;
  void move(Done& done);
  void push(int peer, Done& done);
  void pull(int peer, Done& done);
  Arriving begin(int source, const std::byte* slot);
  // Of a message that came before its recv. Throws Error(kTransport) if there is none.
  std::unique_ptr<std::byte[]> memory_for(int source, const Message& message) const;
  bool take_early(const RequestRef& recv, Done& done);
  void deliver(const Early& early, const RequestRef& recv, Done& done);
  static bool matches(const Request& recv, int source, uint64_t tag);
  bool agree(Request& recv, int source, const Message& sent) const;
  void end(const RequestRef& request, Done& done);
  // Fails the whole group.
  void fail(const Error& error, Done& done);
  void end_all(const Error& error, Done& done);
  AwaitedFlags awaited() const;
  // The ranks that pending requests name, as a bit mask.
  uint64_t needed_peers() const;
  static void report(const Done& done);

  Communicator& communicator_;
  const transport::Transport& transport_;
  std::function<void()> check_interrupt_;
  Waiter waiter_;
  WaitPolicy policy_;

  std::mutex mutex_;  // guards all that follows
  transport::Links links_;
  std::vector<std::deque<RequestRef>> sends_;  // by receiver, in the order of their calls
  std::list<RequestRef> recvs_;                // not matched yet, in the order of their calls
  std::list<std::shared_ptr<Early>> early_;    // in the order of arrival
  std::vector<Arriving> arriving_;             // by sender
  uint64_t num_requests_ = 0;
  uint64_t num_unfinished_ = 0;
  uint64_t num_waits_ = 0;  // begun so far
  int num_waiting_ = 0;     // threads in wait()
  bool is_attended_ = false;
  bool is_closing_ = false;
  ForkSafe<std::condition_variable> attendant_;  // wakes the borrowed thread when this closes
  ProgressQueue attendant_queue_;
  uint64_t fork_generation_;
};

}  // namespace rota
