// The memory of one rank's region: the only place that knows offsets. One layout for shared memory
// between processes and plain memory between threads.
//
//   ControlBlock | mailbox 0 | mailbox 1 | slot 0 | slot 1 | link slots [receiver][slot]
//
// The control block has one writer, its owner; everybody else maps it read-only. Messages and slots
// are written by their owner too, but in two_shot each shard of them changes hands: its reducer
// writes the sum back to where the contribution came from. Memory behind the control block is
// reserved by its owner before anybody touches it: for collectives at the first one, for a link at
// the first message. No pointer is ever stored here, and
// every bound comes from the reader's own Geometry, never from what a peer wrote. csrc/README.md
// has the table of sync words with orders and the argument for each reuse of a slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "base/limits.h"

namespace rota::transport {

inline constexpr size_t kPageBytes = 4096;

// What a rank says of what it queues on its GPU, one after the other. It may be kNum ahead of the
// slowest rank that does the same.
template <size_t kNum>
struct LaunchPosts {
  static constexpr size_t kNumPosts = kNum;

  Flag launched;     // how many
  Flag posts[kNum];  // [number % kNum]: number, counted from 1; payload: its Call

  const Flag& post(uint64_t number) const { return posts[number % kNum]; }
  Flag& post(uint64_t number) { return posts[number % kNum]; }
};

// Written by the owner, read by all; every word rests at 0.
struct alignas(kPageBytes) ControlBlock {
  Flag post[2];        // [epoch % 2]: the epoch that the owner has entered; payload: its Call
  uint64_t source[2];  // [epoch % 2], written before the post: where in its heap the owner's tensor
                       // lies, see core/communicator.cpp
  Flag filled;         // rounds (ring: steps) whose slot the owner has filled
  Flag drained;  // rounds of which the owner has read, and in two_shot reduced, what is its to read
  Flag sleeping;          // 1 while the owner sleeps on a flag: the one word here that also shrinks
  Flag departed;          // 1 once the owner has closed its communicator
  Flag regions_left;      // steps that the owner has taken to let go of GPUs' regions: odd, its
                          // kernels have ended; even, it has unmapped those of its peers
  Flag abort;             // 1 once the owner has failed; payload[0]: ErrorKind
  char abort_text[1024];  // zero-terminated; written before abort
  Flag link_filled[kMaxWorldSize];   // by receiver: messages that the owner has put into that link
  Flag link_drained[kMaxWorldSize];  // by sender: messages that the owner has read from that link
  Flag sleeping_on_links;            // as sleeping, of threads that wait for messages of links
  LaunchPosts<128> launches;         // collectives on GPUs
  LaunchPosts<8> sends[kMaxWorldSize];     // from the owner's GPU, by receiver
  LaunchPosts<8> receives[kMaxWorldSize];  // to it, by sender
};

// Bytes of a region, from an offset on.
struct Span {
  size_t offset;
  size_t num_bytes;
};

// Round r of a pipelined collective uses slot r % kNumSlots. The protocol needs 2, and more are
// slower: what is in flight should stay in the second-level cache (two_shot, 2 ranks, 256 KiB
// slots, 16 MiB: 1.50 ms with 2 slots, 1.57 with 3, 1.69 with 8).
inline constexpr int kNumSlots = 2;

// Messages of consecutive epochs take turns in this many places of a mailbox: one that is written
// again while it still lies in its readers' first-level caches costs more (one_shot, 2 ranks, 16
// KiB: 3.3 us with one place, 2.6 with 4).
inline constexpr size_t kPlacesPerMailbox = 4;

// Message m of a link uses slot m % kNumHostLinkSlots. With more of them a sender can be further
// ahead; with fewer, what is in flight stays in the second-level cache.
inline constexpr int kNumHostLinkSlots = 8;

// What every rank must agree on; bootstrap compares it.
struct Geometry {
  size_t message_bytes;  // the longest message of a one-round collective
  size_t slot_bytes;     // one round of a pipelined collective
  size_t link_slot_bytes = 32 << 10;

  bool operator==(const Geometry&) const = default;

  // Offsets, in the order of the picture above. A mailbox is written in every other epoch, and is
  // then free as a whole: where in it a message lies is only a question of speed.
  constexpr size_t message(uint64_t epoch, size_t num_bytes) const {
    const size_t stride = (num_bytes / kCacheLineBytes + 1) * kCacheLineBytes;
    const size_t num_places = mailbox_bytes() / stride;
    return sizeof(ControlBlock) + epoch % 2 * mailbox_bytes() + epoch / 2 % num_places * stride;
  }
  constexpr size_t slot(uint64_t round) const {
    return sizeof(ControlBlock) + 2 * mailbox_bytes() + round % kNumSlots * slot_bytes;
  }
  constexpr size_t link_slot(int receiver, uint64_t message) const {
    return slot(0) + kNumSlots * slot_bytes + static_cast<size_t>(receiver) * link_bytes() +
           message % kNumHostLinkSlots * link_slot_bytes;
  }
  constexpr size_t num_bytes(int world_size) const { return link_slot(world_size, 0); }

  // What is reserved together.
  constexpr Span collectives() const {
    return {sizeof(ControlBlock), link_slot(0, 0) - sizeof(ControlBlock)};
  }
  constexpr Span link(int receiver) const { return {link_slot(receiver, 0), link_bytes()}; }

 private:
  constexpr size_t link_bytes() const { return kNumHostLinkSlots * link_slot_bytes; }
  constexpr size_t mailbox_bytes() const {
    return kPlacesPerMailbox * (message_bytes + kCacheLineBytes);
  }
};

// The region of any rank: its control block to read, its messages and slots to read and write.
class Region {
 public:
  Region(std::byte* base, const Geometry& geometry) : base_(base), geometry_(geometry) {}

  const ControlBlock& control() const { return *reinterpret_cast<const ControlBlock*>(base_); }
  std::byte* at(size_t offset) const { return base_ + offset; }
  std::byte* slot(uint64_t round) const { return base_ + geometry_.slot(round); }

 private:
  std::byte* base_;
  Geometry geometry_;
};

}  // namespace rota::transport
