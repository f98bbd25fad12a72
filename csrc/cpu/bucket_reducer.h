// Element work of a gradient bucket's all-reduce, in one pass each way. Contributions are
// multiplied, rounded to the wire format and written to the slots; sums are kept in float32,
// divided, and rounded once more; results are multiplied, measured, and written to the bucket.
//
// The methods are those of reducer.h. Whichever of them an algorithm calls, each element of the
// bucket is contributed once and written once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/bucket_packer.h"
#include "cpu/buffers.h"
#include "cpu/element_loops.h"
#include "cpu/reducer.h"
#include "schedule/chunk.h"

namespace rota::cpu {

class BucketReducer {
 public:
  static constexpr uint64_t kGranuleElems = kTileElems;

  BucketReducer(const Call& call, const Buffers& buffers, int rank, int world_size);

  const WireFormat& wire() const { return wire_; }
  size_t hop_bytes() const { return sizeof(float); }
  // A contribution is encoded only once: one that is already in a slot is read from there.
  WirePlace own_source(const WirePlace& packed) const { return packed; }

  void pack(const schedule::Range& range, const WirePlace& wire) const;
  void unpack(const WirePlace& wire, const schedule::Range& range) const;
  void reduce(const WirePlace* srcs, const schedule::Range& range,
              std::span<const WirePlace> wire_outs) const;
  void start_partial(const schedule::Range& range, std::byte* hop) const;
  void add_to_partial(const std::byte* partial, const schedule::Range& range, std::byte* hop) const;
  void finish_partial(const std::byte* partial, const schedule::Range& range,
                      const WirePlace& wire) const;
  void sum_to_partial(std::span<const WirePlace> srcs, const schedule::Range& range,
                      std::byte* hop) const;
  void sum_partials(std::span<const std::byte* const> partials, const schedule::Range& range,
                    const WirePlace& wire) const;

 private:
  std::byte* data(uint64_t elem) const { return data_ + elem * info(dtype_).num_bytes; }
  void pack_tile(const schedule::Range& tile, const WirePlace& wire) const {
    packer_.pack(tile, tile.begin / kTileElems, wire);
  }
  void round_contribution(const schedule::Range& tile, float* rounded) const;
  void add_contribution(const float* partial, const schedule::Range& tile, float* sums) const;
  void sum_contributions(std::span<const WirePlace> srcs, const schedule::Additions& additions,
                         const schedule::Range& tile, uint64_t begin, float* sums) const;
  void unpack_tile(const WirePlace& wire, const schedule::Range& tile) const;
  void finish_tile(float* sums, const schedule::Range& tile, const WirePlace& wire) const;
  void copy_tile(const WirePlace& from, const WirePlace& to, size_t num_elems) const;

  std::byte* data_;
  DType dtype_;
  WireFormat wire_;
  BucketPass pass_;
  BucketPacker packer_;
  BucketMeasures* measures_;
  int world_size_;
  schedule::SumOrder order_;
  const ElementLoops& loops_;
  const WireLoops& wire_loops_;
};

}  // namespace rota::cpu
