// Collectives over several hosts that move or sum parts for each rank. Every byte crosses between
// two hosts once: each rank exchanges it with its partner there (schedule/hosts.h), and the ranks
// of a host share it through their memory. Chunks are pipelined.
#pragma once

#include "cpu/buffers.h"
#include "hosts/bridge.h"
#include "hosts/hierarchical_sum.h"
#include "hosts/scratch.h"
#include "schedule/call.h"

namespace rota::hosts {

// call: an all_gather, of bytes or in a wire format. A host receives each other host's parts once.
void hierarchical_all_gather(Bridge& bridge, Scratch& scratch, const Call& call,
                             const cpu::Buffers& buffers);

// Long tensors go from host to host in a chain, so each host sends them once.
void hierarchical_broadcast(Bridge& bridge, const Call& call, std::byte* data);

// The sums are those of hierarchical_sum(). A host sends its sum of each other host's parts once.
void hierarchical_reduce_scatter(Bridge& bridge, Scratch& scratch, const Call& call,
                                 const LevelOrders& orders, const cpu::Buffers& buffers);

}  // namespace rota::hosts
