// All-reduce over several hosts. Within a host, the ranks reduce-scatter a chunk in the accumulate
// dtype; each rank then sums its shard with the ranks of its rail, one on each other host; at last
// the host's ranks all-gather the results. Between hosts each host is one contributor: its sum is
// rounded once to the wire format, the sum over the hosts is kept in the accumulate dtype, and
// rounded once more.
//
// With N bytes in the wire format and H hosts, a host sends 2 (H - 1) / H N bytes and receives as
// many (Patarasuk & Yuan 2009). Each host's first rank sums short tensors alone: it sends N
// bytes to each other host, with the greeting of the call, and shares the result. Chunks are
// pipelined: while one is awaited, the messages of the next are on their way.
#pragma once

#include "hosts/reducers.h"

namespace rota::hosts {

// An all_reduce, reduce or reduce_bucket. Every rank's data becomes the sum.
void hierarchical_sum(const Task& task);

}  // namespace rota::hosts
