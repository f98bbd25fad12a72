// A group of ranks. Runs one collective at a time: counts epochs, compares the ranks' calls, and
// turns any failure into an error on every rank. Calls are planned in core/plan.h and executed in
// cpu/ and cuda/.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fork_generation.h"
#include "core/point_to_point.h"
#include "core/watch.h"
#include "cpu/buffers.h"
#include "cpu/slot_stores.h"
#include "schedule/call.h"
#include "transport/transport.h"

namespace rota {

class Communicator {
 public:
  // timeout applies to each wait of a collective that has none of its own. check_interrupt runs
  // several times a second while a user's thread waits, and may throw.
  Communicator(std::unique_ptr<transport::Transport> transport, Nanoseconds timeout,
               std::function<void()> check_interrupt);
  // Tells peers that this rank has left.
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int world_size() const { return transport_->world_size(); }

  // Blocks until this rank's part is done. Throws Error. Thread-safe, but all ranks must call in
  // the same order. own_timeout: of each wait of this call; none: the group's. It is no part of the
  // Call, because ranks may differ in it.
  void run(const Call& call, const cpu::Buffers& buffers, CallerThread thread,
           std::optional<Nanoseconds> own_timeout = std::nullopt);
  void barrier(CallerThread thread) { run({.kind = CollectiveKind::kBarrier}, {}, thread); }
  // Only compares the ranks' calls, as run() does.
  void agree(const Call& call, CallerThread thread,
             std::optional<Nanoseconds> own_timeout = std::nullopt);

  // Posts the collective that this rank is about to queue on its GPU. All ranks post in the same
  // order. Waits only if a peer is far behind (transport/layout.h). Throws Error(kMismatch) if a
  // peer has posted another call; that ends the group, since the peer's kernel already waits.
  // Returns the call's fingerprint, which the kernels compare.
  uint64_t post_launch(const Call& call);
  // The same for a transfer between two ranks, of which this rank is one.
  uint64_t post_transfer(const Call& call, int sender, int receiver);
  uint64_t num_posted_launches() const;

  // Messages between two ranks, which need no turn among the collectives.
  PointToPoint& point_to_point() { return point_to_point_; }

  // Whether this is a forked child's copy, whose memory and messages are its parent's.
  bool is_of_parent() const { return fork_generation_ != fork_generation(); }
  // Throws Error(kInternal) in a forked child.
  void check_process(std::string_view call) const;
  // Likewise. In a group that has failed, throws the kind of error that it failed with, because a
  // user may look at any of several failed calls first.
  void check_usable(std::string_view collective) const;

  // For ranks that are one host's part of a group: says that this one has done its part of that
  // call of the group.
  void record_completed_call(uint64_t number) {
    transport_->own_control().completed_call.record(number);
  }

  // The kind of error that later calls throw; none while the group is usable.
  std::optional<ErrorKind> failure() const;

  // Ranks whose processes have ended, with the fact in a sentence. From any thread; costs a system
  // call.
  std::map<int, std::string> ended_ranks() const;

  // Fails every waiting and later call on every rank with this text.
  void abort(const std::string& reason);
  // The same with a known cause: later calls on all ranks raise this kind of error.
  void fail(const Error& cause);

  const transport::Transport& transport() const { return *transport_; }
  CoreSharing& core_sharing() { return core_sharing_; }
  // For flags outside collectives.
  Waiter& waiter() { return waiter_; }
  Nanoseconds timeout() const { return watch_.timeout(); }
  // For later waits.
  void set_timeout(Nanoseconds timeout) { watch_.set_timeout(timeout); }

 private:
  // Runs body() as this rank's next collective.
  template <typename Body>
  void in_epoch(const Call& call, CallerThread thread, std::optional<Nanoseconds> own_timeout,
                const Body& body);
  void rendezvous(const Call& call);
  void wait_for_post(int peer);
  // Says where peers find this rank's tensor, before the rendezvous.
  void post_source(const cpu::Source& source);
  // Every rank's, after it; none if one of them cannot be read in place.
  // bytes_of(peer): what this rank reads there.
  template <typename BytesOf>
  std::optional<cpu::Sources> find_sources(const cpu::Source& own, BytesOf bytes_of) const;
  // posts_of(rank) returns the posts of a participating rank.
  template <typename PostsOf>
  uint64_t post_launch(const Call& call, std::span<const int> ranks, const PostsOf& posts_of);
  // post_of(rank) returns the flag with that rank's Call.
  template <typename PostOf>
  Error mismatch(const Call& own, uint64_t epoch, std::span<const int> ranks,
                 const PostOf& post_of) const;
  // Later calls raise kind_here on this rank and kind on its peers.
  // has_cause: as Error's, of the text.
  void publish_abort(ErrorKind kind_here, ErrorKind kind, const std::string& text,
                     bool has_cause = false);
  int parity() const { return static_cast<int>(epoch_ % 2); }

  std::unique_ptr<transport::Transport> transport_;
  CoreSharing core_sharing_;
  Waiter waiter_;
  std::function<void()> check_interrupt_;
  Watch watch_;
  WaitPolicy wait_policy_;
  std::vector<int> everyone_;

  std::mutex mutex_;         // one collective at a time
  uint64_t epoch_ = 0;       // collectives entered; posted to peers
  uint64_t num_rounds_ = 0;  // rounds used by all collectives so far; the same on every rank
  bool mailboxes_are_reserved_ = false;  // on every rank
  cpu::SlotWriter slot_writer_;

  std::mutex abort_mutex_;  // the abort record is written once
  std::atomic<bool> is_dead_{false};
  std::string dead_reason_;  // set before is_dead_, constant afterwards, as the next one
  ErrorKind dead_kind_ = ErrorKind::kInternal;
  uint64_t fork_generation_;

  PointToPoint point_to_point_;  // last: goes first
};

}  // namespace rota
