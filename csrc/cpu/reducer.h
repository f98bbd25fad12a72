// Element work of one all-reduce: tensor to wire, sums, wire to tensor. Every algorithm rounds a
// sum once to the wire dtype. A tensor of another dtype is cast block by block, so no copy of it in
// the wire dtype exists outside the slots.
//
// Reducer handles every dtype and op; BucketReducer (bucket_reducer.h) handles gradient buckets,
// with the same methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/tile.h"
#include "cpu/element_loops.h"
#include "schedule/call.h"
#include "schedule/chunk.h"
#include "schedule/sum_order.h"

namespace rota::cpu {

// As a source of a sum: this rank's contribution, read straight from the tensor.
inline constexpr WirePlace kFromTensor{nullptr, nullptr};
constexpr bool is_from_tensor(const WirePlace& place) { return place.payload == nullptr; }

class Reducer {
 public:
  // Shards start at multiples of this.
  static constexpr uint64_t kGranuleElems = rota::kGranuleElems;

  // writes_sums: whether reduce() writes to the tensor, too.
  Reducer(const Call& call, void* data, bool writes_sums, int world_size);

  const WireFormat& wire() const { return wire_; }
  size_t hop_bytes() const { return info(hop_).num_bytes; }
  // The source of this rank's contribution in a sum, given where it is packed.
  WirePlace own_source(const WirePlace& packed) const { return is_plain() ? kFromTensor : packed; }

  // Ranges are in elements of the tensor. Calls do not depend on earlier ones.

  // Tensor -> wire, rounding once.
  void pack(const schedule::Range& range, const WirePlace& wire) const;
  // Wire -> tensor, exact.
  void unpack(const WirePlace& wire, const schedule::Range& range) const;
  // Sums all ranks' contributions in the call's order. Writes the result to the tensor, if sums are
  // written there, and to each of wire_outs, which may be among srcs.
  void reduce(const WirePlace* srcs, const schedule::Range& range,
              std::span<const WirePlace> wire_outs) const;

  // Ring hops: write this rank's contribution, added to `partial` if there is one, as a partial sum
  // in the hop dtype.
  void start_partial(const schedule::Range& range, std::byte* hop) const;
  void add_to_partial(const std::byte* partial, const schedule::Range& range, std::byte* hop) const;
  // The last addition of a ring: writes the rounded sum to the tensor and the wire.
  void finish_partial(const std::byte* partial, const schedule::Range& range,
                      const WirePlace& wire) const;

  // Two levels, each in the call's order: contributions to a partial sum in the hop dtype, and
  // partial sums to the rounded sum, which goes to the wire and, if sums are written there, to the
  // tensor.
  void sum_to_partial(std::span<const WirePlace> srcs, const schedule::Range& range,
                      std::byte* hop) const;
  void sum_partials(std::span<const std::byte* const> partials, const schedule::Range& range,
                    const WirePlace& wire) const;

 private:
  // The tensor has the wire dtype, so sums can read it directly.
  bool is_plain() const { return dtype_ == wire_.dtype; }
  std::byte* data(uint64_t elem) const { return data_ + elem * info(dtype_).num_bytes; }
  void widen_contribution(const schedule::Range& range, std::byte* hop) const;
  ReduceFn add_to_hop() const;  // a partial sum is not divided

  std::byte* data_;
  bool writes_sums_;
  DType dtype_;
  WireFormat wire_;
  DType hop_;
  ReduceOp op_;
  int world_size_;
  int divisor_;  // of kAvg
  schedule::SumOrder order_;
  const ElementLoops& loops_;
  ReduceFn reduce_wire_;  // complete sums of wire elements
};

}  // namespace rota::cpu
