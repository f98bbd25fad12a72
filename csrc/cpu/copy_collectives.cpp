#include "cpu/copy_collectives.h"

#include <cstring>

#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

std::byte* at(void* base, uint64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* at(const void* base, uint64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

void copy_own_input(const AllGatherArgs& args, int rank) {
  void* own_output = args.outputs[rank];
  // memmove: an all-gather in place hands in a part of its output.
  if (own_output != args.input) std::memmove(own_output, args.input, args.num_bytes);
}

}  // namespace

void contribute_to_mailbox(const BroadcastArgs& args, const transport::Transport& transport,
                           int parity) {
  if (transport.rank() != args.root) return;
  std::memcpy(transport.own().mailbox(parity), args.data, args.num_bytes);
}

void copy_from_mailboxes(const BroadcastArgs& args, const transport::Transport& transport,
                         int parity) {
  if (transport.rank() == args.root) return;
  std::memcpy(args.data, transport.region(args.root).mailbox(parity), args.num_bytes);
}

// The root fills slot r % 2 again in round r + 2, once all others have drained round r.
uint64_t broadcast(const BroadcastArgs& args, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(args.num_bytes, exchange.slot_bytes());
  const bool is_root = exchange.rank() == args.root;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(args.num_bytes, exchange.slot_bytes(), round);
    if (is_root) {
      for (int i = 0; round >= 2 && i < exchange.world_size() - 1; ++i) {
        const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
        exchange.wait_drained(peer, round - 2, "broadcast send");
      }
      std::memcpy(exchange.own_in_slot(round), at(args.data, chunk.begin), chunk.num_elems);
      exchange.publish_filled(round);
    } else {
      exchange.wait_filled(args.root, round, "broadcast receive");
      std::memcpy(at(args.data, chunk.begin), exchange.in_slot(args.root, round), chunk.num_elems);
      exchange.publish_drained(round);
    }
  }
  return num_rounds;
}

void contribute_to_mailbox(const AllGatherArgs& args, const transport::Transport& transport,
                           int parity) {
  std::memcpy(transport.own().mailbox(parity), args.input, args.num_bytes);
}

void copy_from_mailboxes(const AllGatherArgs& args, const transport::Transport& transport,
                         int parity) {
  copy_own_input(args, transport.rank());
  for (int i = 0; i < transport.world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(transport.rank(), transport.world_size(), i);
    std::memcpy(args.outputs[peer], transport.region(peer).mailbox(parity), args.num_bytes);
  }
}

// Slot r % 2 is filled again in round r + 2, after this rank waited for all peers to fill round r +
// 1, which they do after they have read round r.
uint64_t all_gather(const AllGatherArgs& args, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(args.num_bytes, exchange.slot_bytes());
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(args.num_bytes, exchange.slot_bytes(), round);
    std::memcpy(exchange.own_in_slot(round), at(args.input, chunk.begin), chunk.num_elems);
    exchange.publish_filled(round);
    for (int i = 0; i < exchange.world_size() - 1; ++i) {
      const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
      exchange.wait_filled(peer, round, "all_gather receive");
      std::memcpy(at(args.outputs[peer], chunk.begin), exchange.in_slot(peer, round),
                  chunk.num_elems);
    }
  }
  copy_own_input(args, exchange.rank());
  return num_rounds;
}

}  // namespace rota::cpu
