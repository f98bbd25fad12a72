// A group of ranks and its collectives, one at a time: checks arguments, compares descriptors,
// counts epochs, chooses the algorithm, and turns whatever goes wrong into an error on every rank.
// Knows pointers and dtypes; torch stops in tensor/.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/descriptor.h"
#include "core/point_to_point.h"
#include "core/watch.h"
#include "cpu/all_reduce.h"
#include "cpu/copy_collectives.h"
#include "transport/transport.h"

namespace rota {

struct AllReduceRequest {
  uint64_t num_elems;
  DType dtype;
  ReduceOp op = ReduceOp::kSum;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
  std::optional<DType> wire;                     // none: dtype
  std::optional<DType> hop;                      // none: accumulate dtype; only for ring
};

struct BucketRequest {
  uint64_t num_elems;
  DType dtype;
  WireFormat wire;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
};

// What a rank says of an all-reduce, of a gradient bucket too.
Descriptor describe(const cpu::AllReduceArgs& args);

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

  // Fill in what the request leaves open, all but the pointers; throw Error(kType) or Error(kValue)
  // for what cannot be done.
  cpu::AllReduceArgs plan(const AllReduceRequest& request) const;
  cpu::AllReduceArgs plan(const BucketRequest& request, const cpu::BucketPass& pass) const;
  void check_root(int root) const;

  // Each blocks until this rank's part is done, and throws Error. Safe to call from several
  // threads; all ranks must then agree on the order by other means.
  void all_reduce(const cpu::AllReduceArgs& args, CallerThread thread);
  void broadcast(const cpu::BroadcastArgs& args, DType dtype, CallerThread thread);
  void all_gather(const cpu::AllGatherArgs& args, DType dtype, CallerThread thread);
  void barrier(CallerThread thread);

  // Says which collective this rank queues on its GPU, in the order in which all ranks do. Does not
  // wait for them, unless one is far behind (transport/layout.h). Throws Error(kMismatch) where a
  // peer has said otherwise; that ends the group, since the peer's kernel is already waiting.
  // Returns the descriptor's fingerprint, by which the kernels compare.
  uint64_t post_launch(const Descriptor& descriptor);
  // The same of a tensor from one rank to another, of which this is one.
  uint64_t post_transfer(const Descriptor& descriptor, int sender, int receiver);
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
  // Of flags that are none of a collective, so that it needs no turn.
  Waiter& waiter() { return waiter_; }
  Nanoseconds timeout() const { return watch_.timeout(); }

 private:
  // What runs if this is requested; none: auto.
  schedule::Algorithm algorithm_for(std::optional<schedule::Algorithm> requested,
                                    uint64_t num_wire_bytes) const;
  // The frame of every collective: post, rendezvous, and in one message or in rounds do what args
  // say.
  template <typename Args>
  void run(const Descriptor& descriptor, const Args& args, CallerThread thread);
  void rendezvous(const Descriptor& descriptor);
  // posts_of(rank): where those that take part say so.
  template <typename PostsOf>
  uint64_t post_launch(const Descriptor& descriptor, std::span<const int> ranks,
                       const PostsOf& posts_of);
  // post_of(rank): where each of these ranks has its descriptor.
  template <typename PostOf>
  Error mismatch(const Descriptor& own, uint64_t epoch, std::span<const int> ranks,
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
