// The messages of one rank that are under way. A message is a header and its elements, and travels
// through a link in chunks. What arrives is matched with the recvs by source and tag,
// and kept on the heap if it comes before its recv, without a limit: beyond any limit, ranks that
// both send first, or a collective behind a send, would wait for each other forever. A rank that
// waits for nothing takes nothing in that it has not asked for, so that its senders wait for room.
//
// Knows nothing of waits, threads and the end of a group. Not safe for several threads at once.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/waiter.h"
#include "core/watch.h"
#include "cpu/copy.h"
#include "cpu/slot_stores.h"
#include "transport/links.h"

namespace rota {

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
  Request(Direction direction, std::byte* data, const Message& message, int peer,
          std::function<void(const Request&)> on_done = {})
      : direction_(direction),
        peer_(peer),
        message_(message),
        data_(data),
        on_done_(std::move(on_done)) {}

  bool is_done() const { return is_done_.load(std::memory_order_acquire); }
  // Valid once done: the failure, if any, and the other rank.
  const std::optional<Error>& error() const { return error_; }
  int peer() const { return peer_; }

 private:
  friend class MessageQueues;
  friend class PointToPoint;

  Direction direction_;
  int peer_;  // kAnyRank until a message matches
  Message message_;
  std::byte* data_;
  uint64_t num_moved_ = 0;  // bytes
  uint64_t number_ = 0;     // among the requests of this rank, from 1
  Nanoseconds moved_at_{};  // steady_now() when a part of it moved last
  std::function<void(const Request&)> on_done_;
  std::optional<Error> error_;  // set before is_done_, constant afterwards
  std::atomic<bool> is_done_{false};
};
// Owns nothing if the caller of a send or recv waits for it and keeps the request on its stack.
using RequestRef = std::shared_ptr<Request>;

inline Nanoseconds steady_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

class MessageQueues {
 public:
  // Requests that have finished, for their on_done to be called.
  using Done = std::vector<RequestRef>;
  // The flags to wait for: on the stack, because waits for short messages are frequent.
  class AwaitedFlags {
   public:
    void add(const Awaited& flag) { flags_[num_flags_++] = flag; }
    std::span<const Awaited> all() const { return {flags_.data(), num_flags_}; }

   private:
    static_assert(kMaxWorldSize <= Waiter::kMaxAwaited);
    std::array<Awaited, kMaxWorldSize> flags_;
    size_t num_flags_ = 0;
  };

  // waiter: as for transport::Links.
  MessageQueues(transport::Transport& transport, Waiter& waiter);

  // Starts a request, and moves what can be moved at once between its rank and its peer. Throws
  // like move(). A message to the own rank passes no link: its send is done at once.
  void start(const RequestRef& request, Done& done);
  // Moves what can be moved at once. What no recv has asked for is taken in only until this request
  // is done; null: not at all. It stays with its sender otherwise, and once a recv asks for it,
  // goes where it belongs without a copy on the heap. Throws Error(kTransport) if memory is short,
  // Error(kInternal) for a damaged post.
  void move(Done& done, const Request* awaited);
  // Likewise, but takes in everything.
  void move_all(Done& done);
  // Fails all outstanding requests and later ones, and drops what still arrives. The first error
  // stays.
  void end_all(const Error& error, Done& done);
  const std::optional<Error>& end_error() const { return end_error_; }

  // The sender of the first message with this tag that has come before its recv; none: there is
  // none.
  std::optional<int> find_early(uint64_t tag) const;

  uint64_t num_unfinished() const { return num_unfinished_; }
  // The last send to some receiver; null if no send is outstanding.
  const Request* last_send() const;
  // The flags that let move() go on.
  AwaitedFlags awaited() const;
  // The ranks that pending requests name, as a bit mask.
  uint64_t needed_peers() const;

 private:
  // A message that came before its recv.
  struct Early {
    int source;
    Message message;
    std::unique_ptr<std::byte[]> data;
    bool is_whole = false;
    RequestRef taken_by;  // a recv that came while the message was still arriving
  };
  // A message that a link has received in part, or none.
  struct Arriving {
    std::optional<Message> message;
    uint64_t num_bytes_left = 0;
    RequestRef recv;               // one of these two
    std::shared_ptr<Early> early;  //
    std::byte* data = nullptr;     // where the next bytes go; null: they are dropped
    cpu::OutputCopier copier = cpu::OutputCopier::for_message(0);
  };

  // takes_unasked: whether to take in what no recv has asked for.
  template <typename TakesUnasked>
  void move_while(const TakesUnasked& takes_unasked, Done& done);
  template <typename TakesUnasked>
  void exchange(int peer, const TakesUnasked& takes_unasked, Done& done);
  template <typename TakesUnasked>
  void pull(int peer, const TakesUnasked& takes_unasked, Done& done);
  void push(int peer, Done& done);
  void send_to_self(const RequestRef& send, Done& done);
  // Returns false if there is no room.
  bool push_chunk(Request& send);
  // Without a message if that is left with its sender.
  Arriving begin(int source, const Message& message, bool takes_unasked);
  static void take(Arriving& arriving, const std::byte* in, uint64_t num_bytes);
  // Memory for a message that came before its recv. Throws Error(kTransport) if it is short.
  std::unique_ptr<std::byte[]> memory_for(int source, const Message& message) const;
  bool take_early(const RequestRef& recv, Done& done);
  void deliver(const Early& early, const RequestRef& recv, Done& done);
  static bool matches(const Request& recv, int source, uint64_t tag);
  bool agree(Request& recv, int source, const Message& sent) const;
  void end(const RequestRef& request, Done& done);

  const transport::Transport& transport_;
  transport::Links links_;
  cpu::SlotWriter answer_writer_;              // into cells that this rank has read last
  cpu::SlotWriter writer_;                     // into other cells
  std::vector<std::deque<RequestRef>> sends_;  // by receiver, in the order of their calls
  std::deque<RequestRef> recvs_;               // not matched yet, in the order of their calls
  std::list<std::shared_ptr<Early>> early_;    // in the order of arrival
  std::vector<Arriving> arriving_;             // by sender
  uint64_t num_unfinished_ = 0;
  std::optional<Error> end_error_;
};

}  // namespace rota
