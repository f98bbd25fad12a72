// One channel's links to the other ranks (transport/device_layout.h), in the verbs that collectives
// are written in. A collective numbers its messages from 0 on every link; what earlier launches
// sent is added here. With the first message goes the fingerprint of the launch, which the receiver
// compares with its own.
//
//   sender    wait(to_send) ... write the slots ... block.sync(), publish
//   receiver  wait(to_read) ... read the slots ...  block.sync(), release
//
// Where both follow one barrier, publish comes first: the message is awaited now, the slot only
// later. Either order is correct: nothing waits in between, and the barrier has made both true. Who
// gets the message may go on before the release is out, but writes no slot here that it has not
// seen to be free: by the release, whenever that comes, or by a message that was sent after the
// slot had been read (two_shot).
//
// All threads of a block call each verb. Thread i waits for, tells and counts the i-th rank of a
// set, all at once, of which there are no more than threads; the barriers around make the others'
// accesses part of what it orders.
#pragma once

#include "cuda/peers.h"
#include "cuda/system_word.h"
#include "cuda/wait.h"
#include "schedule/rank_set.h"

namespace rota::cuda {

using schedule::RankSet;
using transport::kNumLinkSlots;

// The links with the ranks of a set, and what this thread knows of the one that it handles. No link
// is in two sets of a launch that send, or in two that receive: both would number their messages
// from the same count.
struct LinkSet {
  RankSet ranks = schedule::nobody();
  uint64_t sent = 0;      // by earlier launches, to this thread's rank
  uint64_t received = 0;  // by earlier launches, from it
};

// What wait() waits for, of every rank in a set except the own.
struct ToSend {  // that a slot is free for message `message` to them
  LinkSet links;
  uint64_t message;
};
struct ToRead {  // that message `message` of theirs has arrived
  LinkSet links;
  uint64_t message;
};

template <typename Block>
class Links {
 public:
  HOST_DEVICE Links(const Block& block, const Peers& peers, uint64_t fingerprint)
      : block_(block), peers_(peers), fingerprint_(fingerprint) {}

  HOST_DEVICE int rank() const { return peers_.rank_of(block_); }
  HOST_DEVICE int world_size() const { return peers_.world_size(); }
  // Where a message to `peer` is written, and where one of `peer` is read.
  HOST_DEVICE std::byte* outgoing(int peer, uint64_t message) const {
    return peers_.regions[peer] + peers_.geometry.slot(block_.index(), rank(), message);
  }
  HOST_DEVICE std::byte* incoming(int peer, uint64_t message) const {
    return peers_.regions[rank()] + peers_.geometry.slot(block_.index(), peer, message);
  }

  // Loads this thread's counts, once for many verbs: no other thread writes them, and this one does
  // so at the end of the launch, so that no barrier is needed.
  HOST_DEVICE LinkSet open(const RankSet& ranks) const {
    LinkSet set{ranks};
    for_own(ranks, [&](int peer) {
      const auto& counts = own_end(peer).counts;
      set.sent = counts.sent;
      set.received = counts.received;
    });
    return set;
  }

  // The block goes on together, once everything is there. False: it has been given up.
  template <typename... Awaited>
  HOST_DEVICE bool wait(const Awaited&... awaited) const {
    const bool is_there = (... && wait_for_own_part(awaited));
    return block_.all(is_there);
  }

  // After block.sync(): what was written to the slots of `message` may be read.
  HOST_DEVICE void publish(const LinkSet& to, uint64_t message) const {
    for_own(to.ranks, [&](int peer) {
      transport::DeviceFlag& filled = end_at(peer).filled;
      if (message == 0) filled.payload = fingerprint_;
      store(filled, to.sent + message + 1);
    });
  }
  // After block.sync(): the slots of `message` have been read and may be written again.
  HOST_DEVICE void release(const LinkSet& from, uint64_t message) const {
    for_own(from.ranks,
            [&](int peer) { store(end_at(peer).drained, from.received + message + 1); });
  }

  // At the end of a launch: how many messages went over each link.
  HOST_DEVICE void count_sent(const LinkSet& to, uint64_t num_messages) const {
    for_own(to.ranks, [&](int peer) { own_end(peer).counts.sent = to.sent + num_messages; });
  }
  HOST_DEVICE void count_received(const LinkSet& from, uint64_t num_messages) const {
    for_own(from.ranks,
            [&](int peer) { own_end(peer).counts.received = from.received + num_messages; });
  }

 private:
  // This thread's rank of a set, if it has one.
  template <typename Body>
  HOST_DEVICE void for_own(const RankSet& ranks, const Body& body) const {
    const int peer = ranks.rank_at(block_.thread());
    if (block_.thread() < ranks.num_ranks && peer != rank()) body(peer);
  }

  HOST_DEVICE bool wait_for_own_part(const ToSend& awaited) const {
    bool is_free = true;
    for_own(awaited.links.ranks, [&](int peer) {
      // A slot's first message of this launch finds it empty once all earlier launches' were read.
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
      // The peer sends nothing of a later launch before the own block has gone on from here.
      if (is_there && awaited.message == 0) {
        is_there =
            is_same_launch(block_, peers_, peer, WaitPhase::kArrival, fingerprint_, filled.payload);
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
  uint64_t fingerprint_;
};

}  // namespace rota::cuda
