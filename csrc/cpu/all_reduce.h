// All-reduce on the CPU: one rank's part, in place, in the caller's thread. What each
// algorithm costs is in csrc/README.md.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/all_reduce_buffers.h"
#include "cpu/exchange.h"
#include "schedule/call.h"

namespace rota::cpu {

// Bytes of the one message that does for the whole collective; none for rings, which need steps.
// One message: every rank contributes, posts, and completes once all have posted.
std::optional<uint64_t> message_bytes(const Call& call, const AllReduceBuffers&);
void contribute(const Call& call, const AllReduceBuffers& buffers, const Mailboxes& mailboxes);
// Returns the number of rounds used, which is the same on every rank.
uint64_t complete(const Call& call, const AllReduceBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange& exchange);

// What this rank has for peers that read its tensor in place.
Source source_of(const Call& call, const AllReduceBuffers& buffers, int rank);
// Once all ranks have posted a source: two_shot without slots. No rank returns before its peers
// have read its tensor. Returns the number of rounds used.
uint64_t run_in_place(const Call& call, const AllReduceBuffers& buffers, const Sources& sources,
                      Exchange& exchange);

// Pipelined through slots, once all ranks have posted. Returns the number of rounds used.
uint64_t run_rounds(const Call& call, const AllReduceBuffers& buffers, Exchange& exchange);

}  // namespace rota::cpu
