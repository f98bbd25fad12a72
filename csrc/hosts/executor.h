// How each collective runs over several hosts: this rank's part, in the calling thread.
#pragma once

#include "hosts/reducers.h"

namespace rota::hosts {

// Blocks until it is done. The call's wire format is what travels between hosts. Throws Error, as
// Bridge::run().
void execute(const Task& task);

// ---- what it runs; all but the first within Bridge::run()

// An all_reduce, reduce or reduce_bucket. Every rank's data becomes the sum.
void hierarchical_sum(const Task& task);

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
