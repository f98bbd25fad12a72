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

void copy_own_input(const Call& call, const AllGatherBuffers& buffers, int rank) {
  void* own_output = buffers.outputs[rank];
  // memmove, because the input of an in-place all-gather is part of its output.
  if (own_output != buffers.input && call.num_bytes() != 0) {
    std::memmove(own_output, buffers.input, call.num_bytes());
  }
}

}  // namespace

void contribute(const Call& call, const BroadcastBuffers& buffers, const Mailboxes& mailboxes) {
  if (mailboxes.rank() != call.root) return;
  copy_bytes(mailboxes.own(), buffers.data, call.num_bytes());
}

uint64_t complete(const Call& call, const BroadcastBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange&) {
  if (mailboxes.rank() != call.root) {
    copy_bytes(buffers.data, mailboxes.of(call.root), call.num_bytes());
  }
  return 0;
}

Source source_of(const Call& call, const BroadcastBuffers& buffers, int rank) {
  if (rank != call.root) return {.kind = Source::Kind::kNothing};
  return {.kind = Source::Kind::kTensor, .tensor = buffers.data};
}

uint64_t run_in_place(const Call& call, const BroadcastBuffers& buffers, const Sources& sources,
                      Exchange& exchange) {
  if (exchange.rank() == call.root) {
    exchange.wait_drained_by_peers(0, "broadcast in place");
  } else {
    copy_bytes(buffers.data, sources[static_cast<size_t>(call.root)], call.num_bytes());
    exchange.publish_drained(0);
  }
  return 1;
}

// Two slots suffice: the root refills the slot of round r in round r + 2, once all other ranks have
// drained round r.
uint64_t run_rounds(const Call& call, const BroadcastBuffers& buffers, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(call.num_bytes(), exchange.slot_bytes());
  const bool is_root = exchange.rank() == call.root;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(call.num_bytes(), exchange.slot_bytes(), round);
    if (is_root) {
      if (round >= 2) exchange.wait_drained_by_peers(round - 2, "broadcast send");
      copy_bytes(exchange.own_slot(round), at(buffers.data, chunk.begin), chunk.num_elems);
      exchange.publish_filled(round);
    } else {
      exchange.wait_filled(call.root, round, "broadcast receive");
      copy_bytes(at(buffers.data, chunk.begin), exchange.slot(call.root, round), chunk.num_elems);
      exchange.publish_drained(round);
    }
  }
  return num_rounds;
}

void contribute(const Call& call, const AllGatherBuffers& buffers, const Mailboxes& mailboxes) {
  copy_bytes(mailboxes.own(), buffers.input, call.num_bytes());
}

uint64_t complete(const Call& call, const AllGatherBuffers& buffers, const Mailboxes& mailboxes,
                  Exchange&) {
  copy_own_input(call, buffers, mailboxes.rank());
  for (int i = 0; i < mailboxes.world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(mailboxes.rank(), mailboxes.world_size(), i);
    copy_bytes(buffers.outputs[peer], mailboxes.of(peer), call.num_bytes());
  }
  return 0;
}

Source source_of(const Call&, const AllGatherBuffers& buffers, int) {
  return {.kind = Source::Kind::kTensor, .tensor = buffers.input};
}

uint64_t run_in_place(const Call& call, const AllGatherBuffers& buffers, const Sources& sources,
                      Exchange& exchange) {
  for (int i = 0; i < exchange.world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
    copy_bytes(buffers.outputs[peer], sources[static_cast<size_t>(peer)], call.num_bytes());
  }
  exchange.publish_drained(0);
  copy_own_input(call, buffers, exchange.rank());
  exchange.wait_drained_by_peers(0, "all_gather in place");
  return 1;
}

// Two slots suffice: round r + 2 overwrites the slot of round r, but only after every peer has
// filled round r + 1, which a peer does after it has read round r.
uint64_t run_rounds(const Call& call, const AllGatherBuffers& buffers, Exchange& exchange) {
  const uint64_t num_rounds = schedule::ceil_div(call.num_bytes(), exchange.slot_bytes());
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Range chunk = schedule::chunk_of(call.num_bytes(), exchange.slot_bytes(), round);
    copy_bytes(exchange.own_slot(round), at(buffers.input, chunk.begin), chunk.num_elems);
    exchange.publish_filled(round);
    for (int i = 0; i < exchange.world_size() - 1; ++i) {
      const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
      exchange.wait_filled(peer, round, "all_gather receive");
      copy_bytes(at(buffers.outputs[peer], chunk.begin), exchange.slot(peer, round),
                 chunk.num_elems);
    }
  }
  copy_own_input(call, buffers, exchange.rank());
  return num_rounds;
}

}  // namespace rota::cpu
