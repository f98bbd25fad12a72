// Collectives over several hosts that move or sum parts for each rank. Every byte crosses between
// two hosts once: each rank exchanges it with its partner there (schedule/hosts.h), and the ranks
// of a host share it through their memory. Chunks are pipelined.
#pragma once

#include "hosts/reducers.h"

namespace rota::hosts {

// Of bytes or in a wire format. A host receives each other host's parts once.
void hierarchical_all_gather(const Task& task);

// Long tensors go from host to host in a chain, so each host sends them once.
void hierarchical_broadcast(const Task& task);

// The sums are those of hierarchical_sum(). A host sends its sum of each other host's parts once.
void hierarchical_reduce_scatter(const Task& task);

// Gather, scatter and all-to-all: each part goes from its rank to the one that it is for, through
// the host's memory or the network. A rank sends to others at once.
void exchange_parts(const Task& task);

}  // namespace rota::hosts
