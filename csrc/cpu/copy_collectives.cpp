#include "cpu/copy_collectives.h"

#include <cstring>

#include "cpu/copy.h"
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
  if (own_output != args.input && args.num_bytes != 0) {
    std::memmove(own_output, args.input, args.num_bytes);
  }
}

}  // namespace

void contribute(const BroadcastArgs& args, const Mailboxes& mailboxes) {
  if (mailboxes.rank() != args.root) return;
  copy_bytes(mailboxes.own(), args.data, args.num_bytes);
}

uint64_t complete(const BroadcastArgs& args, const Mailboxes& mailboxes, Exchange&) {
  if (mailboxes.rank() != args.root) {
    copy_bytes(args.data, mailboxes.of(args.root), args.num_bytes);
  }
  return 0;
}

// Two slots suffice: the root fills that of round r again in round r + 2, once all others have
// drained round r.
uint64_t run_rounds(const BroadcastArgs& args, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(args.num_bytes, exchange.slot_bytes());
  const bool is_root = exchange.rank() == args.root;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(args.num_bytes, exchange.slot_bytes(), round);
    if (is_root) {
      for (int i = 0; round >= 2 && i < exchange.world_size() - 1; ++i) {
        const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
        exchange.wait_drained(peer, round - 2, "broadcast send");
      }
      copy_bytes(exchange.own_slot(round), at(args.data, chunk.begin), chunk.num_elems);
      exchange.publish_filled(round);
    } else {
      exchange.wait_filled(args.root, round, "broadcast receive");
      copy_bytes(at(args.data, chunk.begin), exchange.slot(args.root, round), chunk.num_elems);
      exchange.publish_drained(round);
    }
  }
  return num_rounds;
}

void contribute(const AllGatherArgs& args, const Mailboxes& mailboxes) {
  copy_bytes(mailboxes.own(), args.input, args.num_bytes);
}

uint64_t complete(const AllGatherArgs& args, const Mailboxes& mailboxes, Exchange&) {
  copy_own_input(args, mailboxes.rank());
  for (int i = 0; i < mailboxes.world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(mailboxes.rank(), mailboxes.world_size(), i);
    copy_bytes(args.outputs[peer], mailboxes.of(peer), args.num_bytes);
  }
  return 0;
}

// Two slots suffice: that of round r is filled again in round r + 2, after this rank waited for all
// peers to fill round r + 1, which they do after they have read round r.
uint64_t run_rounds(const AllGatherArgs& args, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(args.num_bytes, exchange.slot_bytes());
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(args.num_bytes, exchange.slot_bytes(), round);
    copy_bytes(exchange.own_slot(round), at(args.input, chunk.begin), chunk.num_elems);
    exchange.publish_filled(round);
    for (int i = 0; i < exchange.world_size() - 1; ++i) {
      const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
      exchange.wait_filled(peer, round, "all_gather receive");
      copy_bytes(at(args.outputs[peer], chunk.begin), exchange.slot(peer, round), chunk.num_elems);
    }
  }
  copy_own_input(args, exchange.rank());
  return num_rounds;
}

}  // namespace rota::cpu
