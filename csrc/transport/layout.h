// The memory of one rank's region: the only place that knows offsets. One layout for shared memory
// between processes and plain memory between threads.
//
//   ControlBlock | mailbox 0 | mailbox 1 | in-slot 0 | in-slot 1 | out-slot 0 | out-slot 1
//
// A region has one writer, its owner; every other rank maps it read-only. No pointer is ever stored
// in it, and every bound comes from the reader's own Geometry, never from what a peer wrote.
// csrc/README.md has the table of sync words with orders and the argument for each reuse of a slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"

namespace rota::transport {

// Written by the owner, read by all; every word rests at 0.
struct ControlBlock {
  Flag post[2];   // [epoch % 2]: the epoch that the owner has entered; payload: its descriptor
  Flag filled;    // rounds (ring: steps) whose slot the owner has filled
  Flag drained;   // rounds of which the owner has read every in-slot that it reads
  Flag sleeping;  // 1 while the owner sleeps on a flag: the one word here that also shrinks
  Flag departed;  // 1 once the owner has closed its communicator
  Flag abort;     // 1 once the owner has failed; payload[0]: ErrorKind
  char abort_text[1024];  // zero-terminated; written before abort
};

// What every rank must agree on; bootstrap compares it.
struct Geometry {
  size_t mailbox_bytes;  // one message of a one-round collective
  size_t slot_bytes;     // one round of a pipelined collective

  bool operator==(const Geometry&) const = default;

  // Offsets, in the order of the picture above.
  constexpr size_t mailbox(int parity) const {
    return sizeof(ControlBlock) + static_cast<size_t>(parity) * mailbox_bytes;
  }
  constexpr size_t in_slot(int parity) const {
    return mailbox(2) + static_cast<size_t>(parity) * slot_bytes;
  }
  constexpr size_t out_slot(int parity) const {
    return in_slot(2) + static_cast<size_t>(parity) * slot_bytes;
  }
  constexpr size_t num_bytes() const { return out_slot(2); }
};

// A peer's region: reading only.
class RegionView {
 public:
  RegionView(const std::byte* base, const Geometry& geometry) : base_(base), geometry_(geometry) {}

  const ControlBlock& control() const { return *reinterpret_cast<const ControlBlock*>(base_); }
  const std::byte* mailbox(int parity) const { return base_ + geometry_.mailbox(parity); }
  const std::byte* in_slot(int parity) const { return base_ + geometry_.in_slot(parity); }
  const std::byte* out_slot(int parity) const { return base_ + geometry_.out_slot(parity); }

 private:
  const std::byte* base_;
  Geometry geometry_;
};

// The own region: the same places, to write.
class Region {
 public:
  Region(std::byte* base, const Geometry& geometry) : base_(base), geometry_(geometry) {}

  ControlBlock& control() const { return *reinterpret_cast<ControlBlock*>(base_); }
  std::byte* mailbox(int parity) const { return base_ + geometry_.mailbox(parity); }
  std::byte* in_slot(int parity) const { return base_ + geometry_.in_slot(parity); }
  std::byte* out_slot(int parity) const { return base_ + geometry_.out_slot(parity); }
  RegionView view() const { return {base_, geometry_}; }

 private:
  std::byte* base_;
  Geometry geometry_;
};

}  // namespace rota::transport
