// All-gather in a wire format: each rank encodes its part once, and every rank, the owner included,
// decodes the same bytes, so all of them hold the same values. Scaled blocks count from the start
// of each part.
#include "base/tile.h"
#include "cpu/element_loops.h"
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "cpu/parts.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

struct alignas(64) Floats {
  float values[kTileElems];
};

// Calls body(elem, num_elems) for each tile of a range, counted from its start.
template <typename Body>
void for_each_tile(const Range& range, const Body& body) {
  for (uint64_t elem = 0; elem < range.num_elems; elem += kTileElems) {
    body(elem, schedule::min_of(kTileElems, range.num_elems - elem));
  }
}

// Elements between a tensor and the wire.
class PartCodec {
 public:
  explicit PartCodec(const Call& call)
      : dtype_(call.dtype), wire_(call.wire), loops_(element_loops()) {}

  // Ranges start at a tile of the part.
  void encode(const Part& part, const Range& range, std::byte* to) const {
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

  void decode(std::byte* from, const Part& part, const Range& range) const {
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
  std::byte* elem_at(const Part& part, uint64_t elem) const {
    return at(part, elem * info(dtype_).num_bytes);
  }

  DType dtype_;
  WireFormat wire_;
  const ElementLoops& loops_;
};

class EncodedAllGather final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    return call.wire.num_bytes(longest_elems(call, buffers, world_size));
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const IeeeFloatScope ieee;
    PartCodec(call).encode(*buffers.inputs, whole(*buffers.inputs), mailboxes.own());
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const IeeeFloatScope ieee;
    const PartCodec codec(call);
    for (int owner = 0; owner < mailboxes.world_size(); ++owner) {
      const Part& output = buffers.outputs[owner];
      codec.decode(mailboxes.of(owner), output, whole(output));
    }
    return 0;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const IeeeFloatScope ieee;
    const PartCodec codec(call);
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const uint64_t round_elems = call.wire.capacity(exchange.slot_bytes(), kTileElems);
    const uint64_t num_rounds =
        schedule::ceil_div(longest_elems(call, buffers, world_size), round_elems);
    const auto chunk_of = [&](const Part& part, uint64_t round) {
      return schedule::chunk_of(part.num_elems, round_elems, round);
    };
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range own = chunk_of(*buffers.inputs, round);
      codec.encode(*buffers.inputs, own, exchange.own_slot(round));
      exchange.publish_filled(round);
      codec.decode(exchange.own_slot(round), buffers.outputs[rank], own);
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        const Part& output = buffers.outputs[owner];
        exchange.wait_filled(owner, round, "all_gather decode");
        codec.decode(exchange.slot(owner, round), output, chunk_of(output, round));
      }
    }
    return num_rounds;
  }

 private:
  static Range whole(const Part& part) { return {0, part.num_elems}; }
  static uint64_t longest_elems(const Call& call, const Buffers& buffers, int world_size) {
    return longest_of(call, buffers.outputs, world_size) / info(call.dtype).num_bytes;
  }
};

}  // namespace

const Executor& encoded_all_gather_executor() {
  static const EncodedAllGather executor;
  return executor;
}

}  // namespace rota::cpu
