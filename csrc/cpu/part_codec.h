// Elements of a rank's part between its tensor and a wire format, for collectives that encode parts
// instead of copying them.
#pragma once

#include "base/tile.h"
#include "cpu/element_loops.h"
#include "cpu/parts.h"
#include "schedule/call.h"
#include "schedule/chunk.h"

namespace rota::cpu {

class PartCodec {
 public:
  explicit PartCodec(const Call& call)
      : dtype_(call.dtype), wire_(call.wire), loops_(element_loops()) {}

  // Ranges start at a tile of the part.
  void encode(const Part& part, const schedule::Range& range, std::byte* to) const {
    const WirePlace place = wire_.place(to, range.num_elems);
    if (!wire_.is_block_scaled) {
      return loops_.convert(dtype_, wire_.dtype)(elem_at(part, range.begin), place.payload,
                                                 range.num_elems);
    }
    for_each_tile(range, [&](uint64_t elem, uint64_t num_elems) {
      Floats widened;
      const std::byte* src = elem_at(part, range.begin + elem);
      const auto* floats = reinterpret_cast<const float*>(src);
      if (dtype_ != DType::kFloat32) {
        loops_.convert(dtype_, DType::kFloat32)(src, widened.values, num_elems);
        floats = widened.values;
      }
      loops_.wire(wire_).encode(floats, wire_.from(place, elem), num_elems, 1);
    });
  }

  void decode(std::byte* from, const Part& part, const schedule::Range& range) const {
    const WirePlace place = wire_.place(from, range.num_elems);
    if (!wire_.is_block_scaled) {
      return loops_.convert(wire_.dtype, dtype_)(place.payload, elem_at(part, range.begin),
                                                 range.num_elems);
    }
    for_each_tile(range, [&](uint64_t elem, uint64_t num_elems) {
      Floats decoded;
      std::byte* dst = elem_at(part, range.begin + elem);
      const bool is_float32 = dtype_ == DType::kFloat32;
      float* floats = is_float32 ? reinterpret_cast<float*>(dst) : decoded.values;
      const WirePlace tile = wire_.from(place, elem);
      loops_.wire(wire_).decode_sum({&tile, 1}, floats, num_elems, 1);
      if (!is_float32) loops_.convert(DType::kFloat32, dtype_)(floats, dst, num_elems);
    });
  }

 private:
  struct alignas(64) Floats {
    float values[kTileElems];
  };

  // Calls body(elem, num_elems) for each tile of a range, counted from its start.
  template <typename Body>
  static void for_each_tile(const schedule::Range& range, const Body& body) {
    for (uint64_t elem = 0; elem < range.num_elems; elem += kTileElems) {
      body(elem, schedule::min_of(kTileElems, range.num_elems - elem));
    }
  }
  std::byte* elem_at(const Part& part, uint64_t elem) const {
    return at(part, elem * info(dtype_).num_bytes);
  }

  DType dtype_;
  WireFormat wire_;
  const ElementLoops& loops_;
};

}  // namespace rota::cpu
