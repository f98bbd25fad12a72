// Broadcast and all-gather on the CPU: bytes only, no arithmetic. Like all-reduce, a message that
// fits a mailbox goes with the post; a longer one is pipelined through the in-slots.
#pragma once

#include <cstdint>

#include "cpu/exchange.h"

namespace rota::cpu {

struct BroadcastArgs {
  void* data;  // read on root, written elsewhere
  uint64_t num_bytes;
  int root;
};

struct AllGatherArgs {
  const void* input;  // num_bytes of this rank
  void* const*
      outputs;  // by rank: where that rank's num_bytes go; the own entry may be input itself
  uint64_t num_bytes;
};

inline bool fits_mailbox(uint64_t num_bytes, const transport::Geometry& geometry) {
  return num_bytes <= geometry.mailbox_bytes;
}

void contribute_to_mailbox(const BroadcastArgs& args, const transport::Transport& transport,
                           int parity);
void copy_from_mailboxes(const BroadcastArgs& args, const transport::Transport& transport,
                         int parity);
// Returns the number of rounds used, which is the same on every rank.
uint64_t broadcast(const BroadcastArgs& args, Exchange& exchange);

void contribute_to_mailbox(const AllGatherArgs& args, const transport::Transport& transport,
                           int parity);
void copy_from_mailboxes(const AllGatherArgs& args, const transport::Transport& transport,
                         int parity);
uint64_t all_gather(const AllGatherArgs& args, Exchange& exchange);

}  // namespace rota::cpu
