// The element work of one all-reduce: tensor to wire, sums, wire to tensor. A sum is rounded once
// to the wire dtype, whichever algorithm forms it; a tensor of another dtype is cast block by block
// on the way, so no copy of it in the wire dtype exists outside the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/limits.h"
#include "cpu/element_loops.h"

namespace rota::cpu {

class Reducer {
 public:
  // hop: the dtype in which rings pass partial sums on.
  Reducer(DType dtype, DType wire, DType hop, ReduceOp op, int world_size);

  size_t elem_bytes() const { return info(dtype_).num_bytes; }
  size_t wire_bytes() const { return info(wire_).num_bytes; }
  size_t hop_bytes() const { return info(hop_).num_bytes; }
  // The tensor itself is a source in the wire dtype: it need not be read from a slot.
  bool is_plain() const { return dtype_ == wire_; }

  // data -> wire, rounding once.
  void pack(const void* data, void* wire, size_t num_elems) const;
  // wire -> data, exact.
  void unpack(const void* wire, void* data, size_t num_elems) const;
  // Sums sources in the wire dtype in ascending order; the result goes to data and to each of
  // wire_outs. These, and in a plain reduction data, may be among srcs.
  void reduce(const void* const* srcs, void* data, std::span<std::byte* const> wire_outs,
              size_t num_elems) const;

  // Ring hops: a partial sum in the hop dtype plus the own contribution, still as a partial sum.
  void start_partial(const void* data, void* hop, size_t num_elems) const;
  void add_to_partial(const void* partial, const void* data, void* hop, size_t num_elems) const;
  // The last addition of a ring: the sum, rounded, to data and wire.
  void finish_partial(const void* partial, void* data, void* wire, size_t num_elems) const;

 private:
  // Cuts a loop into blocks whose temporaries stay in the first-level cache.
  template <typename Body>
  void for_each_block(size_t num_elems, Body&& body) const;
  void widen_contribution(const void* data, void* hop, size_t num_elems) const;

  DType dtype_;
  DType wire_;
  DType hop_;
  int world_size_;
  const ElementLoops& loops_;
  ReduceFn reduce_wire_;  // complete sums of wire elements
  ReduceFn add_hop_;      // partial sums of hop elements: never divides
  ReduceFn finish_hop_;   // complete sums of hop elements
};

}  // namespace rota::cpu
