// All-reduce on the CPU: one rank's part, in place, in the caller's thread. csrc/README.md lists
// the cost of each algorithm.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/all_reduce_buffers.h"
#include "cpu/exchange.h"
#include "schedule/call.h"

namespace rota::cpu {

// The size of the message if one message is enough for the whole collective; none for rings, which
// need steps, and with a residual. Every rank then contributes, posts, and completes once all ranks
// have posted.
std::optional<uint64_t> message_bytes(const Call& call, const AllReduceBuffers&);
void contribute(const Call& call, const AllReduceBuffers& buffers, const Mailboxes& mailboxes);
// Returns the number of rounds used, which is the same on every rank.
uint64_t complete(const Call& call, const AllReduceBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange& exchange);

// What peers can read in place from this rank.
Source source_of(const Call& call, const AllReduceBuffers& buffers, int rank);
// Once all ranks have posted a source: two_shot without slots. No rank returns before its peers
// have read its tensor. Returns the number of rounds used.
uint64_t run_in_place(const Call& call, const AllReduceBuffers& buffers, const Sources& sources,
                      Exchange& exchange);

// Pipelined through slots, once all ranks have posted. Returns the number of rounds used.
uint64_t run_rounds(const Call& call, const AllReduceBuffers& buffers, Exchange& exchange);

}  // namespace rota::cpu
