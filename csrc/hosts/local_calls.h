// What collectives over several hosts share: the calls of their parts within one host.
#pragma once

#include <span>

#include "base/random_bits.h"
#include "cpu/buffers.h"
#include "schedule/call.h"

namespace rota::hosts {

// A call whose parts have these lengths, by rank.
inline Call with_parts(Call call, std::span<const cpu::Part> parts) {
  bool are_equal = true;
  uint64_t total = 0;
  uint64_t hash = 0;
  for (const cpu::Part& part : parts) {
    are_equal &= part.num_elems == parts[0].num_elems;
    total += part.num_elems;
    hash = mix(hash ^ (part.num_elems + 1));
  }
  call.num_elems = are_equal ? parts[0].num_elems : total;
  call.uneven = are_equal ? 0 : hash | 1;
  return call;
}

// Where a tensor would begin whose byte `offset` lies at `place`: for code that counts elements
// from a tensor's start, but is given a chunk of it.
inline void* element_zero(std::byte* place, uint64_t offset) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place) - offset);
}

// The sum of a host's contributions, before it is divided.
constexpr ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

// A reduce-scatter among a host's ranks.
inline Call local_reduce_scatter(DType dtype, ReduceOp op, const schedule::SumOrder& order,
                                 std::span<const cpu::Part> parts) {
  Call call{.kind = CollectiveKind::kReduceScatter,
            .op = partial_op(op),
            .dtype = dtype,
            .wire = {dtype},
            .hop = info(dtype).accumulate,
            .order = order};
  return with_parts(call, parts);
}

inline Call local_all_gather(std::span<const cpu::Part> parts) {
  return with_parts({.kind = CollectiveKind::kAllGather}, parts);
}

}  // namespace rota::hosts
