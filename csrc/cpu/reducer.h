// The element work of one all-reduce: tensor to wire, sums, wire to tensor. A sum is rounded once
// to the wire dtype, whichever algorithm forms it; a tensor of another dtype is cast block by block
// on the way, so no copy of it in the wire dtype exists outside the slots.
//
// This one does every dtype and op; bucket_reducer.h does gradient buckets, with the same methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/tile.h"
#include "cpu/element_loops.h"
#include "schedule/call.h"
#include "schedule/chunk.h"

namespace rota::cpu {

// Among the sources of a sum: the own contribution, straight from the tensor.
inline constexpr WirePlace kFromTensor{nullptr, nullptr};
constexpr bool is_from_tensor(const WirePlace& place) { return place.payload == nullptr; }

class Reducer {
 public:
  // Shards start at multiples of this.
  static constexpr uint64_t kGranuleElems = rota::kGranuleElems;

  Reducer(const Call& call, void* data, int world_size);

  const WireFormat& wire() const { return wire_; }
  size_t hop_bytes() const { return info(hop_).num_bytes; }
  // Where a sum takes the own contribution from if it also lies in this place.
  WirePlace own_source(const WirePlace& packed) const { return is_plain() ? kFromTensor : packed; }

  // Ranges are elements of the tensor. All of them are const, and none has a memory of others.

  // Tensor -> wire, rounding once.
  void pack(const schedule::Range& range, const WirePlace& wire) const;
  // Wire -> tensor, exact.
  void unpack(const WirePlace& wire, const schedule::Range& range) const;
  // Sums every rank's contribution in ascending order, group by group where there are groups; the
  // result goes to the tensor and to each of wire_outs, which may be among srcs.
  void reduce(const WirePlace* srcs, const schedule::Range& range,
              std::span<const WirePlace> wire_outs) const;

  // Ring hops: a partial sum in the hop dtype plus the own contribution, still as a partial sum.
  void start_partial(const schedule::Range& range, std::byte* hop) const;
  void add_to_partial(const std::byte* partial, const schedule::Range& range, std::byte* hop) const;
  // The last addition of a ring: the sum, rounded, to tensor and wire.
  void finish_partial(const std::byte* partial, const schedule::Range& range,
                      const WirePlace& wire) const;

 private:
  // The tensor itself is a source in the wire dtype.
  bool is_plain() const { return dtype_ == wire_.dtype; }
  std::byte* data(uint64_t elem) const { return data_ + elem * info(dtype_).num_bytes; }
  void reduce_block(const void* const* srcs, void* dst, size_t num_elems) const;
  void widen_contribution(const schedule::Range& range, std::byte* hop) const;

  std::byte* data_;
  DType dtype_;
  WireFormat wire_;
  DType hop_;
  int world_size_;
  int group_size_;
  const ElementLoops& loops_;
  ReduceFn reduce_wire_;  // complete sums of wire elements
  ReduceFn add_hop_;      // partial sums of hop elements: never divides
  ReduceFn finish_hop_;   // complete sums of hop elements
};

}  // namespace rota::cpu
