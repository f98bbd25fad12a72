// The one way in which a kernel waits: a spin that meets a deadline and sees an abort. It never
// traps: it says in one word why it gave up, and the kernel returns.
#pragma once

#include "cuda/peers.h"
#include "cuda/system_word.h"

namespace rota::cuda {

// How many looks at the awaited word go between two at the abort word and the clock, which lie
// further away (the abort word behind PCIe: about a microsecond).
inline constexpr uint32_t kLooksPerTick = 256;

// Returns once is_there() does; false when the wait was given up. `block` is either a DeviceBlock
// or what stands for one on the host.
template <typename Block, typename IsThere>
HOST_DEVICE bool wait_until(const Block& block, const Peers& peers, int peer, WaitPhase phase,
                            const IsThere& is_there) {
  uint64_t deadline_ns = 0;  // none before the first tick, so that a short wait reads no clock
  for (uint32_t looks = 1; !is_there(); ++looks) {
    block.pause();
    if (looks % kLooksPerTick != 0) continue;
    auto give_up = FailureKind::kNone;
    if (deadline_ns == 0) deadline_ns = block.now_ns() + peers.timeout_ns;
    if (block.now_ns() > deadline_ns) give_up = FailureKind::kTimeout;
    auto& abort = const_cast<uint32_t&>(*peers.abort);  // atomic_ref<const T> comes with C++26
    if (SystemWord<uint32_t>(abort).load(MemoryOrder::relaxed) != 0) {
      give_up = FailureKind::kAborted;
    }
    if (give_up == FailureKind::kNone) continue;
    const Failure failure{give_up, phase, static_cast<uint16_t>(peer),
                          static_cast<uint32_t>(block.index())};
    SystemWord<uint64_t>(*peers.failure).store(failure.pack(), MemoryOrder::relaxed);
    return false;
  }
  return true;
}

}  // namespace rota::cuda
