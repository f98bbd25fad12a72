// Broadcast, all-gather and barrier on the CPU: bytes only, no arithmetic. Like all-reduce, a
// message that fits a mailbox goes with the post; a longer one is pipelined through slots.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/exchange.h"

namespace rota::cpu {

struct BroadcastArgs {
  void* data;  // read on root, written elsewhere
  uint64_t num_bytes;
  int root;
};

struct AllGatherArgs {
  const void* input;  // num_bytes of this rank
  // By rank: where that rank's num_bytes go; the own entry may be input itself.
  void* const* outputs;
  uint64_t num_bytes;
};

// As in all_reduce.h: one message, or rounds.
inline std::optional<uint64_t> message_bytes(const BroadcastArgs& args) { return args.num_bytes; }
void contribute(const BroadcastArgs& args, const Mailboxes& mailboxes);
uint64_t complete(const BroadcastArgs& args, const Mailboxes& mailboxes, Exchange& exchange);
uint64_t run_rounds(const BroadcastArgs& args, Exchange& exchange);

inline std::optional<uint64_t> message_bytes(const AllGatherArgs& args) { return args.num_bytes; }
void contribute(const AllGatherArgs& args, const Mailboxes& mailboxes);
uint64_t complete(const AllGatherArgs& args, const Mailboxes& mailboxes, Exchange& exchange);
uint64_t run_rounds(const AllGatherArgs& args, Exchange& exchange);

// All there is to a barrier is that every rank has posted.
struct BarrierArgs {};
inline std::optional<uint64_t> message_bytes(const BarrierArgs&) { return 0; }
inline void contribute(const BarrierArgs&, const Mailboxes&) {}
inline uint64_t complete(const BarrierArgs&, const Mailboxes&, Exchange&) { return 0; }
inline uint64_t run_rounds(const BarrierArgs&, Exchange&) { return 0; }

}  // namespace rota::cpu
