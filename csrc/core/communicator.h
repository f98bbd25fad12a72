// A group of ranks and the frame of its collectives, one at a time: counts epochs, compares what
// ranks call, and turns whatever goes wrong into an error on every rank. What a call asks for is
// planned in core/plan.h; what it does is in cpu/ and cuda/.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/point_to_point.h"
#include "core/watch.h"
#include "schedule/call.h"
#include "transport/transport.h"

namespace rota {

class Communicator {
 public:
  // timeout: for each wait of a collective. check_interrupt runs several times a second in a
  // long wait of the user's thread, and may throw.
  Communicator(std::unique_ptr<transport::Transport> transport, Nanoseconds timeout,
               std::function<void()> check_interrupt);
  // Tells peers that this rank has left.
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int world_size() const { return transport_->world_size(); }

  // Blocks until this rank's part is done, and throws Error. Safe to call from several threads; all
  // ranks must then agree on the order by other means. buffers: what the call's kind takes, of
  // cpu/all_reduce.h and cpu/copy_collectives.h.
  template <typename Buffers>
  void run(const Call& call, const Buffers& buffers, CallerThread thread);
  void barrier(CallerThread thread);

  // Says which collective this rank queues on its GPU, in the order in which all ranks do. Does not
  // wait for them, unless one is far behind (transport/layout.h). Throws Error(kMismatch) where a
  // peer has said otherwise; that ends the group, since the peer's kernel is already waiting.
  // Returns the fingerprint of the call, by which the kernels compare.
  uint64_t post_launch(const Call& call);
  // The same of a tensor from one rank to another, of which this is one.
  uint64_t post_transfer(const Call& call, int sender, int receiver);
  uint64_t num_posted_launches() const;

  // Messages between two ranks, which need no turn among the collectives.
  PointToPoint& point_to_point() { return point_to_point_; }

  // Throws Error(kInternal) in a forked child, and in a group that has failed before an error of
  // the kind that it failed with: of several calls in flight any may be the first to be looked at.
  void check_usable(std::string_view collective) const;

  // Makes every later and every waiting call on every rank fail with this text.
  void abort(const std::string& reason);
  // The same, where the cause is known: later calls on all ranks raise an error of this kind.
  void fail(const Error& cause);

  const transport::Transport& transport() const { return *transport_; }
  // For flags outside collectives, which need no turn.
  Waiter& waiter() { return waiter_; }
  Nanoseconds timeout() const { return watch_.timeout(); }

 private:
  void rendezvous(const Call& call);
  // posts_of(rank): where those that take part say so.
  template <typename PostsOf>
  uint64_t post_launch(const Call& call, std::span<const int> ranks, const PostsOf& posts_of);
  // post_of(rank): where each of these ranks has said what it calls.
  template <typename PostOf>
  Error mismatch(const Call& own, uint64_t epoch, std::span<const int> ranks,
                 const PostOf& post_of) const;
  // kind_here: of the errors that later calls on this rank get; kind: of those on its peers.
  void publish_abort(ErrorKind kind_here, ErrorKind kind, const std::string& text);
  int parity() const { return static_cast<int>(epoch_ % 2); }

  std::unique_ptr<transport::Transport> transport_;
  Waiter waiter_;
  Watch watch_;
  WaitPolicy wait_policy_;
  std::vector<int> everyone_;

  std::mutex mutex_;           // one collective at a time
  uint64_t epoch_ = 0;         // collectives entered; posted to peers
  uint64_t num_rounds_ = 0;    // rounds used by all collectives so far; the same on every rank
  bool has_reserved_ = false;  // the memory that collectives move data through

  std::mutex abort_mutex_;  // the abort record is written once
  std::atomic<bool> is_dead_{false};
  std::string dead_reason_;  // set before is_dead_, constant afterwards, as the next one
  ErrorKind dead_kind_ = ErrorKind::kInternal;
  uint64_t fork_generation_;

  PointToPoint point_to_point_;  // last: goes first
};

}  // namespace rota
