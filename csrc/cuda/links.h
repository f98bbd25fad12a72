// One channel's links to the other ranks (transport/device_layout.h), as the operations that
// collectives are written in. A collective numbers its messages from 0 on every link; Links adds
// the number that earlier launches sent. The first message carries the launch's fingerprint, which
// the receiver compares with its own.
//
//   sender    wait(to_send) ... write the slots ... block.sync(), publish
//   receiver  wait(to_read) ... read the slots ...  block.sync(), release
//
// If both follow one barrier, publish comes first, because a peer waits for the message now and for
// the slot only later. Either order is correct: nothing waits in between, and the barrier has made
// both true. A peer that gets the message may go on before the release arrives, but it writes a
// slot here only once it knows that the slot is free: from the release, or from a message that was
// sent after the slot had been read (two_shot).
//
// All threads of a block call each operation. Thread i waits for, signals and counts for the i-th
// rank of a set, all at once; a set has no more ranks than the block has threads. The barriers
// around these accesses extend their order to the other threads' accesses.
#pragma once

#include "cuda/peers.h"
#include "cuda/spoil.h"
#include "cuda/system_word.h"
#include "cuda/wait.h"
#include "schedule/rank_set.h"

namespace rota::cuda {

using schedule::RankSet;
using transport::kNumLinkSlots;

// The links with the ranks of a set, and this thread's counts for the rank that it handles. In one
// launch no link is in two sets that send, or in two that receive: both would number their messages
// from the same count.
struct LinkSet {
  RankSet ranks = schedule::nobody();
  uint64_t sent = 0;      // by earlier launches, to this thread's rank
  uint64_t received = 0;  // by earlier launches, from it
};

// What wait() waits for, from every other rank in a set.
struct ToSend {  // a free slot for message `message` to each of them
  LinkSet links;
  uint64_t message;
};
struct ToRead {  // the arrival of message `message` from each of them
  LinkSet links;
  uint64_t message;
};

template <typename Block>
class Links {
 public:
  HOST_DEVICE Links(const Block& block, const Peers& peers, const CollectiveArgs& args)
      : block_(block), peers_(peers), args_(args) {}

  HOST_DEVICE int rank() const { return peers_.rank_of(block_); }
  HOST_DEVICE int world_size() const { return peers_.world_size(); }
  // Where a message to `peer` is written, and where one from `peer` is read.
  HOST_DEVICE std::byte* outgoing(int peer, uint64_t message) const {
    return peers_.regions[peer] + peers_.geometry.slot(block_.index(), rank(), message);
  }
  HOST_DEVICE std::byte* incoming(int peer, uint64_t message) const {
    return peers_.regions[rank()] + peers_.geometry.slot(block_.index(), peer, message);
  }

  // Loads this thread's counts, once for many operations. Needs no barrier: no other thread writes
  // them, and this one does so only at the end of the launch.
  HOST_DEVICE LinkSet open(const RankSet& ranks) const {
    LinkSet set{ranks};
    for_own(ranks, [&](int peer) {
      const auto& counts = own_end(peer).counts;
      set.sent = counts.sent;
      set.received = counts.received;
    });
    return set;
  }

  // Returns in all threads of the block together, once everything awaited is there. False: the wait
  // was given up, and the results are spoiled.
  template <typename... Awaited>
  HOST_DEVICE bool wait(const Awaited&... awaited) const {
    const bool is_there = (... && wait_for_own_part(awaited));
    if (block_.all(is_there)) return true;
    spoil_results(block_, rank(), args_);
    return false;
  }

  // Call after block.sync(). Tells receivers that the slots of `message` may be read.
  HOST_DEVICE void publish(const LinkSet& to, uint64_t message) const {
    for_own(to.ranks, [&](int peer) {
      transport::DeviceFlag& filled = end_at(peer).filled;
      if (message == 0) filled.payload = args_.fingerprint;
      store(filled, to.sent + message + 1);
    });
  }
  // Call after block.sync(). Tells senders that the slots of `message` have been read and may be
  // written again.
  HOST_DEVICE void release(const LinkSet& from, uint64_t message) const {
    for_own(from.ranks,
            [&](int peer) { store(end_at(peer).drained, from.received + message + 1); });
  }

  // At the end of a launch: records how many messages went over each link.
  HOST_DEVICE void count_sent(const LinkSet& to, uint64_t num_messages) const {
    for_own(to.ranks, [&](int peer) { own_end(peer).counts.sent = to.sent + num_messages; });
  }
  HOST_DEVICE void count_received(const LinkSet& from, uint64_t num_messages) const {
    for_own(from.ranks,
            [&](int peer) { own_end(peer).counts.received = from.received + num_messages; });
  }

 private:
  // Calls body(peer) with this thread's rank of a set, if it has one.
  template <typename Body>
  HOST_DEVICE void for_own(const RankSet& ranks, const Body& body) const {
    const int peer = ranks.rank_at(block_.thread());
    if (block_.thread() < ranks.num_ranks && peer != rank()) body(peer);
  }

  HOST_DEVICE bool wait_for_own_part(const ToSend& awaited) const {
    bool is_free = true;
    for_own(awaited.links.ranks, [&](int peer) {
      // A slot is free for this launch's first message once all messages of earlier launches were
      // read.
      const uint64_t message = awaited.message;
      const uint64_t num_read = message < kNumLinkSlots ? 0 : message + 1 - kNumLinkSlots;
      is_free = wait_for(own_end(peer).drained, awaited.links.sent + num_read, peer,
                         WaitPhase::kFreeSlot);
    });
    return is_free;
  }
  HOST_DEVICE bool wait_for_own_part(const ToRead& awaited) const {
    bool is_there = true;
    for_own(awaited.links.ranks, [&](int peer) {
      transport::DeviceFlag& filled = own_end(peer).filled;
      is_there =
          wait_for(filled, awaited.links.received + awaited.message + 1, peer, WaitPhase::kArrival);
      // The payload stays as it is: the peer sends nothing of a later launch before this block goes
      // on from here.
      if (is_there && awaited.message == 0) {
        is_there = is_same_launch(block_, peers_, peer, WaitPhase::kArrival, args_.fingerprint,
                                  filled.payload);
      }
    });
    return is_there;
  }

  HOST_DEVICE bool wait_for(transport::DeviceFlag& flag, uint64_t target, int peer,
                            WaitPhase phase) const {
    return wait_until(block_, peers_, peer, phase, [&] {
      return SystemWord<uint64_t>(flag.value).load(MemoryOrder::acquire) >= target;
    });
  }
  HOST_DEVICE static void store(transport::DeviceFlag& flag, uint64_t value) {
    SystemWord<uint64_t>(flag.value).store(value, MemoryOrder::release);
  }

  // This rank's end of its links with `peer`, and the peer's end.
  HOST_DEVICE transport::LinkEnd& own_end(int peer) const { return end(rank(), peer); }
  HOST_DEVICE transport::LinkEnd& end_at(int peer) const { return end(peer, rank()); }
  HOST_DEVICE transport::LinkEnd& end(int owner, int other) const {
    const size_t offset = peers_.geometry.link_end(block_.index(), other);
    return *reinterpret_cast<transport::LinkEnd*>(peers_.regions[owner] + offset);
  }

  const Block& block_;
  const Peers& peers_;
  const CollectiveArgs& args_;
};

}  // namespace rota::cuda
