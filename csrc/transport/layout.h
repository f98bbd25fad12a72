// The memory of one rank's region: the only place that knows offsets. One layout for shared memory
// between processes and plain memory between threads.
//
//   ControlBlock | mailbox 0 | mailbox 1 | slots | links [receiver]: posts | cells
//
// Only its owner writes the control block; everybody else maps it read-only. Posts are written by
// their owner too, and so are messages and slots, except that places of two ranks change hands
// (cpu/exchange.h), and that in two_shot the rank that reduces a shard writes the sum back over the
// contribution; a cell is written by the one of a link's two ranks that has it. The owner reserves
// the memory behind the control block before anybody touches it: for collectives at the first one,
// and more at the first long copy, for a link at its first message, and more as it uses more cells.
// No pointer is ever stored here, and every bound comes from the reader's own Geometry, never from
// what a peer wrote. csrc/README.md has the table of sync words with their memory orders; each
// executor says why its reuse of a slot is safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "base/limits.h"

namespace rota::transport {

inline constexpr size_t kPageBytes = 4096;

// A rank's posts of the launches that it queues on its GPU, in order. It may be up to kNum launches
// ahead of the slowest participant.
template <size_t kNum>
struct LaunchPosts {
  static constexpr size_t kNumPosts = kNum;

  Flag launched;     // number of launches so far
  Flag posts[kNum];  // [number % kNum]: number, counted from 1; payload: its Call

  const Flag& post(uint64_t number) const { return posts[number % kNum]; }
  Flag& post(uint64_t number) { return posts[number % kNum]; }
};

// Written by the owner, read by all; every word is 0 at rest.
struct alignas(kPageBytes) ControlBlock {
  Flag post[2];        // [epoch % 2]: the epoch that the owner has entered; payload: its Call
  uint64_t source[2];  // [epoch % 2], written before the post: where in its heap the owner's tensor
                       // lies, see core/communicator.cpp
  Flag filled;         // rounds (ring: steps) whose slot the owner has filled
  Flag drained;  // rounds in which the owner has read (two_shot: reduced) its part of peers' slots;
                 // two_level: stages that the owner has completed
  Flag completed;         // the last epoch of which the owner has done its part
  Flag completed_call;    // likewise, of the calls over several hosts
  Flag sleeping;          // 1 while the owner sleeps on a flag, then 0 again
  Flag departed;          // 1 once the owner has closed its communicator
  Flag regions_left;      // steps that the owner has taken to release GPU regions: odd, its
                          // kernels have ended; even, it has unmapped those of its peers
  Flag kernels_ended;     // 1 once the owner has failed and none of its kernels runs
  Flag abort;             // 1 once the owner has failed; payload: ErrorKind, has_cause()
  char abort_text[1024];  // zero-terminated; written before abort
  Flag link_opened[kMaxWorldSize];  // by receiver: 1 once there are posts of that link
  Flag sleeping_on_links;           // like sleeping, for threads that wait for messages of links
  LaunchPosts<128> launches;        // collectives on GPUs
  LaunchPosts<8> sends[kMaxWorldSize];     // from the owner's GPU, by receiver
  LaunchPosts<8> receives[kMaxWorldSize];  // to it, by sender
};

// A range of bytes in a region.
struct Span {
  size_t offset;
  size_t num_bytes;
};

// The rounds of a pipelined collective rotate through its slots. The protocols need 2. A reduction
// is slower with more, because its owner reads a slot again, which should still be in its
// second-level cache (two_shot, 2 ranks, 256 KiB slots, 16 MiB: 1.50 ms with 2 slots, 1.57 with 3,
// 1.69 with 8). A copy is faster with more: its reader finds a slot in the third-level cache, to
// which the writer's second level has given it back, sooner than in that second level itself.
inline constexpr int kNumSlots = 2;
inline constexpr int kNumCopySlots = 8;

// The messages in a mailbox of more than two ranks rotate through this many places. Overwriting one
// that is still in its readers' first-level caches costs more (one_shot, 16 KiB, 2 ranks, before
// their messages changed hands: 3.3 us with one place, 2.6 with 4).
inline constexpr size_t kPlacesPerMailbox = 4;

// A rank's cells of one link. 16 of 128 KiB do not fit into a second-level cache; what was said of
// copies holds here, too. But a rank has some for each peer: with these, up to 8 ranks share at
// most 64 MiB.
constexpr size_t default_num_cells(int world_size) { return world_size <= 5 ? 16 : 6; }

// A cell holds at most so many chunks.
inline constexpr size_t kChunksPerCell = 16;

// What every rank must agree on; bootstrap compares it.
struct Geometry {
  size_t message_bytes;  // the longest message of a one-round collective
  size_t slot_bytes;     // one round of a pipelined collective
  size_t num_cells;      // of one rank, in a link
  size_t cell_bytes = 128 << 10;

  bool operator==(const Geometry&) const = default;

  // Offsets, in the order of the diagram above. A mailbox is written every other epoch and is then
  // entirely free, so a message's place in it affects only speed.
  constexpr size_t message(uint64_t epoch, size_t num_bytes) const {
    const size_t stride = (num_bytes / kCacheLineBytes + 1) * kCacheLineBytes;
    const size_t num_places = mailbox_bytes() / stride;
    return sizeof(ControlBlock) + epoch % 2 * mailbox_bytes() + epoch / 2 % num_places * stride;
  }
  constexpr size_t slot(uint64_t index) const {
    return sizeof(ControlBlock) + 2 * mailbox_bytes() + index * slot_bytes;
  }
  constexpr size_t num_bytes(int world_size) const { return posts(world_size).offset; }

  // The memory of collectives that use the first num_slots slots.
  constexpr Span collectives(int num_slots) const {
    return {sizeof(ControlBlock), slot(static_cast<uint64_t>(num_slots)) - sizeof(ControlBlock)};
  }
  // One rank's link to another has places for the chunks of all cells of both, and of one more.
  constexpr size_t num_posts() const { return kChunksPerCell * (2 * num_cells + 1); }
  constexpr Span posts(int receiver) const {
    const size_t num_bytes = num_posts() * sizeof(Flag);
    return {slot(kNumCopySlots) +
                static_cast<size_t>(receiver) * (num_bytes + num_cells * cell_stride()),
            num_bytes};
  }
  constexpr size_t cell(int receiver, size_t number) const {
    const Span before = posts(receiver);
    return before.offset + before.num_bytes + number * cell_stride();
  }
  constexpr Span cells(int receiver, size_t begin, size_t end) const {
    return {cell(receiver, begin), (end - begin) * cell_stride()};
  }

 private:
  constexpr size_t mailbox_bytes() const {
    return kPlacesPerMailbox * (message_bytes + kCacheLineBytes);
  }
  // A line more, so that the beginnings of all cells do not share a set of a cache.
  constexpr size_t cell_stride() const { return cell_bytes + kCacheLineBytes; }
};

// Any rank's region: its control block is read-only, everything else is read and written.
class Region {
 public:
  Region(std::byte* base, const Geometry& geometry) : base_(base), geometry_(geometry) {}

  const ControlBlock& control() const { return *reinterpret_cast<const ControlBlock*>(base_); }
  std::byte* at(size_t offset) const { return base_ + offset; }
  std::byte* slots() const { return base_ + geometry_.slot(0); }

 private:
  std::byte* base_;
  Geometry geometry_;
};

}  // namespace rota::transport
