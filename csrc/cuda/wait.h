// The only way in which a kernel waits: a spin with a deadline that also polls for an abort. It
// never traps: it writes one word that says why it gave up, and the kernel returns.
#pragma once

#include "cuda/peers.h"
#include "cuda/system_word.h"

namespace rota::cuda {

// Polls of the awaited word per poll of the abort word and the clock, which take longer to read
// (the abort word is behind PCIe: about a microsecond).
inline constexpr uint32_t kLooksPerTick = 256;

// Writes the outcome of a wait to `word`.
template <typename Block>
HOST_DEVICE void report(const Block& block, const Peers& peers, FailureKind kind, WaitPhase phase,
                        int peer, uint64_t* word, uint32_t num_left = 0) {
  const Failure failure{kind,
                        phase,
                        static_cast<uint16_t>(peer),
                        static_cast<uint16_t>(peers.rank_of(block)),
                        static_cast<uint16_t>(block.index()),
                        static_cast<uint8_t>(num_left)};
  SystemWord<uint64_t>(*word).store(failure.pack(), MemoryOrder::relaxed);
}

// Returns true once is_there() does, false if the wait was given up. `block` is a DeviceBlock or
// its stand-in on the host.
template <typename Block, typename IsThere>
HOST_DEVICE bool wait_until(const Block& block, const Peers& peers, int peer, WaitPhase phase,
                            const IsThere& is_there) {
  uint64_t begin_ns = 0;  // set at the first tick, so that a short wait reads no clock
  uint32_t num_left = 0;  // at the last tick: is_there() has been false since
  for (uint32_t looks = 1; !is_there(); ++looks) {
    block.pause();
    if (looks % kLooksPerTick != 0) continue;
    const uint64_t now_ns = block.now_ns();
    if (begin_ns == 0) begin_ns = now_ns;
    const uint64_t waited_ns = now_ns - begin_ns;
    if (waited_ns > peers.stall_after_ns) {
      report(block, peers, FailureKind::kStall, phase, peer, peers.stall, num_left);
      // atomic_ref<const T> comes with C++26
      auto& word = const_cast<uint32_t&>(*peers.num_left);
      num_left = SystemWord<uint32_t>(word).load(MemoryOrder::acquire);
    }
    auto give_up = FailureKind::kNone;
    if (waited_ns > peers.timeout_ns) give_up = FailureKind::kTimeout;
    auto& abort = const_cast<uint32_t&>(*peers.abort);
    if (SystemWord<uint32_t>(abort).load(MemoryOrder::relaxed) != 0) {
      give_up = FailureKind::kAborted;
    }
    if (give_up == FailureKind::kNone) continue;
    report(block, peers, give_up, phase, peer, peers.failure);
    return false;
  }
  return true;
}

// Whether a peer, whose fingerprint has arrived, is in the same launch; reports a mismatch if not.
template <typename Block>
HOST_DEVICE bool is_same_launch(const Block& block, const Peers& peers, int peer, WaitPhase phase,
                                uint64_t own_fingerprint, uint64_t fingerprint) {
  if (fingerprint == own_fingerprint) return true;
  report(block, peers, FailureKind::kMismatch, phase, peer, peers.failure);
  return false;
}

}  // namespace rota::cuda
