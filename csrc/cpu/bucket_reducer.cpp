#include "cpu/bucket_reducer.h"

#include "base/limits.h"
#include "base/random_bits.h"
#include "cpu/copy.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Ranges start at a tile. Calls body(tile, offset): the tile in elements of the tensor, and its
// offset in the range.
template <typename Body>
void for_each_tile(const Range& range, Body&& body) {
  for (uint64_t begin = 0; begin < range.num_elems; begin += kTileElems) {
    body(Range{range.begin + begin, schedule::min_of(kTileElems, range.num_elems - begin)}, begin);
  }
}

}  // namespace

BucketReducer::BucketReducer(const Call& call, const Buffers& buffers, int rank, int world_size)
    : data_(static_cast<std::byte*>(buffers.data)),
      dtype_(call.dtype),
      wire_(call.wire),
      pass_(call.pass),
      packer_(call, buffers, rank),
      measures_(buffers.measures),
      world_size_(world_size),
      order_(call.order),
      loops_(element_loops()),
      wire_loops_(loops_.wire(call.wire)) {}

// This rank's contribution as its receivers decode it.
void BucketReducer::round_contribution(const Range& tile, float* rounded) const {
  EncodedTile own;
  const WirePlace place = own.place();
  pack_tile(tile, place);
  wire_loops_.decode_sum({&place, 1}, rounded, tile.num_elems, 1);
}

void BucketReducer::add_contribution(const float* partial, const Range& tile, float* sums) const {
  TileFloats own;
  round_contribution(tile, own.values);
  const void* srcs[] = {partial, own.values};
  loops_.reduce(DType::kFloat32, ReduceOp::kSum)({srcs, 2}, sums, tile.num_elems, 1);
}

void BucketReducer::unpack_tile(const WirePlace& wire, const Range& tile) const {
  TileFloats converted;
  const bool is_float32 = dtype_ == DType::kFloat32;
  std::byte* out = data(tile.begin);
  float* results = is_float32 ? reinterpret_cast<float*>(out) : converted.values;
  wire_loops_.decode_sum({&wire, 1}, results, tile.num_elems, pass_.result_factor);
  if (!is_float32) {
    loops_.convert(DType::kFloat32, dtype_)(results, out, tile.num_elems);
  }
  if (measures_ == nullptr) return;
  // Measures the values as stored; float64 stores them unchanged.
  if (!is_float32 && dtype_ != DType::kFloat64) {
    loops_.convert(dtype_, DType::kFloat32)(out, results, tile.num_elems);
  }
  measure(*measures_, tile.begin / kTileElems, results, tile.num_elems);
}

// Writes the result of a complete sum to the wire and to the bucket.
void BucketReducer::finish_tile(float* sums, const Range& tile, const WirePlace& wire) const {
  divide_unless_exact(sums, tile.num_elems, pass_.divisor);
  packer_.encode(sums, wire, tile.num_elems, exact_factor(pass_.divisor),
                 {kResultStream, tile.begin / kTileElems});
  unpack_tile(wire, tile);
}

void BucketReducer::copy_tile(const WirePlace& from, const WirePlace& to, size_t num_elems) const {
  copy_bytes(to.payload, from.payload, wire_.payload_bytes(num_elems));
  copy_bytes(to.scales, from.scales, wire_.num_scales(num_elems));
}

void BucketReducer::pack(const Range& range, const WirePlace& wire) const {
  for_each_tile(
      range, [&](const Range& tile, uint64_t begin) { pack_tile(tile, wire_.from(wire, begin)); });
}

void BucketReducer::unpack(const WirePlace& wire, const Range& range) const {
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    unpack_tile(wire_.from(wire, begin), tile);
  });
}

// Sums the tile that lies `begin` elements behind the places.
void BucketReducer::sum_contributions(std::span<const WirePlace> srcs,
                                      const schedule::Additions& additions, const Range& tile,
                                      uint64_t begin, float* sums) const {
  EncodedTile own;
  WirePlace tile_srcs[kMaxWorldSize];
  for (size_t i = 0; i < srcs.size(); ++i) {
    tile_srcs[i] = is_from_tensor(srcs[i]) ? own.place() : wire_.from(srcs[i], begin);
    if (is_from_tensor(srcs[i])) pack_tile(tile, own.place());
  }
  wire_loops_.decode_sum({tile_srcs, static_cast<int>(srcs.size()), additions.of_ranks()}, sums,
                         tile.num_elems, 1);
}

void BucketReducer::reduce(const WirePlace* srcs, const Range& range,
                           std::span<const WirePlace> wire_outs) const {
  const schedule::Additions additions(order_, world_size_);
  TileFloats sums;
  EncodedTile result;
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    sum_contributions({srcs, static_cast<size_t>(world_size_)}, additions, tile, begin,
                      sums.values);
    // Overwrites a source, whose cache lines this core already has: see reducer.cpp.
    const WirePlace out = wire_outs.empty() ? result.place() : wire_.from(wire_outs[0], begin);
    finish_tile(sums.values, tile, out);
    for (size_t i = 1; i < wire_outs.size(); ++i) {
      copy_tile(out, wire_.from(wire_outs[i], begin), tile.num_elems);
    }
  });
}

void BucketReducer::start_partial(const Range& range, std::byte* hop) const {
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    round_contribution(tile, reinterpret_cast<float*>(hop) + begin);
  });
}

void BucketReducer::add_to_partial(const std::byte* partial, const Range& range,
                                   std::byte* hop) const {
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    const auto* sums = reinterpret_cast<const float*>(partial) + begin;
    add_contribution(sums, tile, reinterpret_cast<float*>(hop) + begin);
  });
}

void BucketReducer::finish_partial(const std::byte* partial, const Range& range,
                                   const WirePlace& wire) const {
  TileFloats sums;
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    add_contribution(reinterpret_cast<const float*>(partial) + begin, tile, sums.values);
    finish_tile(sums.values, tile, wire_.from(wire, begin));
  });
}

void BucketReducer::sum_to_partial(std::span<const WirePlace> srcs, const Range& range,
                                   std::byte* hop) const {
  const schedule::Additions additions(order_, static_cast<int>(srcs.size()));
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    sum_contributions(srcs, additions, tile, begin, reinterpret_cast<float*>(hop) + begin);
  });
}

void BucketReducer::sum_partials(std::span<const std::byte* const> partials, const Range& range,
                                 const WirePlace& wire) const {
  const auto num_partials = static_cast<int>(partials.size());
  const schedule::Additions additions(order_, num_partials);
  const ReduceFn add = loops_.reduce(DType::kFloat32, ReduceOp::kSum);
  const void* srcs[kMaxWorldSize / 2];
  TileFloats sums;
  for_each_tile(range, [&](const Range& tile, uint64_t begin) {
    for (size_t i = 0; i < partials.size(); ++i) srcs[i] = partials[i] + begin * hop_bytes();
    add({srcs, num_partials, additions.of_ranks()}, sums.values, tile.num_elems, 1);
    finish_tile(sums.values, tile, wire_.from(wire, begin));
  });
}

}  // namespace rota::cpu
