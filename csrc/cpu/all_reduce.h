// All-reduce on the CPU: one rank's part, in place, in the caller's thread. What each
// algorithm costs is in csrc/README.md.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/all_reduce_args.h"
#include "cpu/exchange.h"

namespace rota::cpu {

// Bytes of the one message that does for the whole collective; none for rings, which need steps.
// One message: every rank contributes, posts, and completes once all have posted.
std::optional<uint64_t> message_bytes(const AllReduceArgs& args);
void contribute(const AllReduceArgs& args, const Mailboxes& mailboxes);
// Returns the number of rounds used, which is the same on every rank.
uint64_t complete(const AllReduceArgs& args, const Mailboxes& mailboxes, Exchange& exchange);

// Pipelined through slots, once all ranks have posted. Returns the number of rounds used.
uint64_t run_rounds(const AllReduceArgs& args, Exchange& exchange);

}  // namespace rota::cpu
