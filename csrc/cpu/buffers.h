// One rank's memory in a collective, whose arguments are in schedule/call.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/fixed_tree.h"
#include "base/limits.h"
#include "base/tile.h"
#include "cpu/copy.h"
#include "cpu/element_loops.h"
#include "schedule/call.h"
#include "schedule/chunk.h"
#include "schedule/pieces.h"

namespace rota::cpu {

// What is measured of the result while it is written to the tensor.
struct BucketMeasures {
  std::vector<double> squares;  // by tile, padded to whole groups of the tree
  uint64_t num_non_finite = 0;

  explicit BucketMeasures(uint64_t num_elems)
      : squares(schedule::ceil_div(num_elems, kTreeGroup * kTileElems) * kTreeGroup) {}
  double sum_of_squares() const {
    std::vector<double> groups(squares.size() / kTreeGroup);
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i] = sum_in_pairs<kTreeGroup>(&squares[i * kTreeGroup]);
    }
    double shared[kTreeDoubles];
    return sum_in_fixed_tree(LoneThread{}, groups.data(), groups.size(), shared);
  }
};

// A rank's part of a tensor, contiguous.
struct Part {
  void* data;
  uint64_t num_elems;
};

// ---- parts as bytes, for collectives that copy

inline uint64_t bytes_of(const Call& call, const Part& part) {
  return part.num_elems * info(call.dtype).num_bytes;
}

inline std::byte* at(const Part& part, uint64_t offset) {
  return static_cast<std::byte*>(part.data) + offset;
}

inline uint64_t longest_of(const Call& call, const Part* parts, int num_parts) {
  uint64_t longest = 0;
  for (int i = 0; i < num_parts; ++i) {
    longest = schedule::max_of(longest, bytes_of(call, parts[i]));
  }
  return longest;
}

inline uint64_t total_of(const Call& call, const Part* parts, int num_parts) {
  uint64_t total = 0;
  for (int i = 0; i < num_parts; ++i) total += bytes_of(call, parts[i]);
  return total;
}

// Whether they lie one behind the other, without gaps.
inline bool are_one_tensor(const Call& call, const Part* parts, int num_parts) {
  const std::byte* end = at(*parts, 0);
  for (int i = 0; i < num_parts; ++i) {
    if (parts[i].data != end) return false;
    end += bytes_of(call, parts[i]);
  }
  return true;
}

// This rank's own part; an input may be where the output is.
inline void copy_own(const Call& call, const Part& from, const Part& to,
                     const OutputCopier& output) {
  if (from.data != to.data) output.copy(to.data, from.data, bytes_of(call, from));
}

// What update_shards needs besides the sums: for each piece of the bucket, where its elements lie
// in this rank's parameters, and for those of this rank, its state.
// By piece; none: its elements stay as they are, but travel, too.
using UpdateSteps = std::vector<std::optional<UpdateStep>>;
struct ShardUpdate {
  std::vector<std::byte*> data;
  // Of other ranks' pieces: nothing. gradients: unused. parameters: null if the elements at `data`
  // are float32 themselves.
  std::vector<UpdateState> states;
  UpdateSteps steps;
};

// A collective uses the members that its row in schedule/collective.h names.
struct Buffers {
  void* data = nullptr;  // of one in place
  // Otherwise one part, or one for each rank, in order; null on ranks that do not contribute or
  // receive. Where a rank's own part is input and output, both may be the same memory; no other
  // parts overlap.
  const Part* inputs = nullptr;
  const Part* outputs = nullptr;
  // For reduce_bucket: the rounding errors of this rank's contributions, in units of the result.
  // They are added to the next contributions and then replaced. Null: no error feedback.
  float* residual = nullptr;
  BucketMeasures* measures = nullptr;  // for reduce_bucket; null: nothing is measured
  // For reduce_shards and update_shards.
  const schedule::Pieces* pieces = nullptr;
  float* sums = nullptr;  // of this rank's row of pieces
  const ShardUpdate* update = nullptr;
};

// What peers can read in this rank's heap instead of receiving it through slots.
struct Source {
  enum class Kind : uint8_t {
    kSlots,    // this call goes through slots
    kNothing,  // peers read nothing from this rank
    kTensor,
  };
  Kind kind = Kind::kSlots;
  const void* tensor = nullptr;
};

// Where this rank can read each rank's source, by rank. Not const, because pointers into slots are
// not.
using Sources = std::array<std::byte*, kMaxWorldSize>;

}  // namespace rota::cpu
