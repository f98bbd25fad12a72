// Broadcast, all-gather and barrier on the CPU: bytes only, no arithmetic. As in all-reduce, a
// message that fits a mailbox travels with the post; a longer one is read in place or pipelined
// through slots.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/exchange.h"
#include "schedule/call.h"

namespace rota::cpu {

struct BroadcastBuffers {
  void* data;  // read on root, written elsewhere
};

struct AllGatherBuffers {
  const void* input;
  // The destination of each rank's input, by rank; the own entry may be `input` itself.
  void* const* outputs;
};

// As in all_reduce.h: one message, or in place, or rounds.
inline std::optional<uint64_t> message_bytes(const Call& call, const BroadcastBuffers&) {
  return call.num_bytes();
}
void contribute(const Call& call, const BroadcastBuffers& buffers, const Mailboxes& mailboxes);
uint64_t complete(const Call& call, const BroadcastBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange& exchange);
Source source_of(const Call& call, const BroadcastBuffers& buffers, int rank);
uint64_t run_in_place(const Call& call, const BroadcastBuffers& buffers, const Sources& sources,
                      Exchange& exchange);
uint64_t run_rounds(const Call& call, const BroadcastBuffers& buffers, Exchange& exchange);

inline std::optional<uint64_t> message_bytes(const Call& call, const AllGatherBuffers&) {
  return call.num_bytes();
}
void contribute(const Call& call, const AllGatherBuffers& buffers, const Mailboxes& mailboxes);
uint64_t complete(const Call& call, const AllGatherBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange& exchange);
Source source_of(const Call& call, const AllGatherBuffers& buffers, int rank);
uint64_t run_in_place(const Call& call, const AllGatherBuffers& buffers, const Sources& sources,
                      Exchange& exchange);
uint64_t run_rounds(const Call& call, const AllGatherBuffers& buffers, Exchange& exchange);

// A barrier is complete once every rank has posted.
struct BarrierBuffers {};
inline std::optional<uint64_t> message_bytes(const Call&, const BarrierBuffers&) { return 0; }
inline void contribute(const Call&, const BarrierBuffers&, const Mailboxes&) {}
inline uint64_t complete(const Call&, const BarrierBuffers&, const Mailboxes&, Exchange&) {
  return 0;
}
inline Source source_of(const Call&, const BarrierBuffers&, int) { return {}; }
inline uint64_t run_in_place(const Call&, const BarrierBuffers&, const Sources&, Exchange&) {
  return 0;
}
inline uint64_t run_rounds(const Call&, const BarrierBuffers&, Exchange&) { return 0; }

}  // namespace rota::cpu
