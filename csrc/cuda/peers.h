// What kernels know of the other ranks, and how a kernel reports that it gave up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/host_device.h"
#include "base/limits.h"
#include "transport/device_layout.h"

namespace rota::cuda {

struct Peers {
  int first_rank;           // the launch's rank, or the first of its local ranks
  int num_local_ranks = 1;  // that one launch works for; rank_of() gives a block's rank
  transport::DeviceGeometry geometry;
  std::byte* regions[kMaxWorldSize];  // by rank; all mapped into this rank's address space
  // In host memory that the GPU maps, like the next three words: the host sets it to 1 to make
  // kernels return.
  const uint32_t* abort;
  // The number of ranks that the host has seen leave. The host's release and the kernel's acquire
  // order it after everything that those ranks have sent.
  const uint32_t* num_left;
  uint64_t* failure;  // a Failure, packed; 0 at rest; any channel writes it
  uint64_t* stall;    // the same, written repeatedly by a wait longer than stall_after_ns
  uint64_t stall_after_ns;
  uint64_t timeout_ns;

  HOST_DEVICE int world_size() const { return geometry.world_size; }
  // Whether one launch works for every rank. If so, stream order takes the place of messages at the
  // start and the end of the kernel.
  HOST_DEVICE bool are_all_local() const { return num_local_ranks == world_size(); }
  template <typename Block>
  HOST_DEVICE int rank_of(const Block& block) const {
    return first_rank + block.local_rank();
  }
};

// kMismatch: the peer is in a launch with another fingerprint (collective_args.h).
enum class FailureKind : uint8_t { kNone, kTimeout, kAborted, kMismatch, kStall };
enum class WaitPhase : uint8_t { kArrival, kFreeSlot, kPacket };

// Why a kernel returned early or, with kStall, whom it has waited long for. One word, so that
// writing it needs no memory order. If several channels write it, one of their words remains.
struct Failure {
  FailureKind kind;
  WaitPhase phase;
  uint16_t peer;
  uint16_t rank;  // the rank that waited
  uint16_t channel;
  // In a stall: Peers::num_left as it was before the kernel last looked for what it awaits.
  uint8_t num_left = 0;

  HOST_DEVICE constexpr uint64_t pack() const {
    return uint64_t{channel} << 48 | uint64_t{rank} << 32 | uint64_t{peer} << 16 |
           uint64_t{num_left} << 8 | uint64_t{static_cast<uint8_t>(phase)} << 4 |
           static_cast<uint8_t>(kind);
  }
  HOST_DEVICE static constexpr Failure unpack(uint64_t word) {
    return {static_cast<FailureKind>(word & 0xf), static_cast<WaitPhase>(word >> 4 & 0xf),
            static_cast<uint16_t>(word >> 16),    static_cast<uint16_t>(word >> 32),
            static_cast<uint16_t>(word >> 48),    static_cast<uint8_t>(word >> 8)};
  }
  // None if the word is at rest.
  static std::optional<Failure> unpack_any(uint64_t word) {
    return word != 0 ? std::optional(unpack(word)) : std::nullopt;
  }
};

}  // namespace rota::cuda
