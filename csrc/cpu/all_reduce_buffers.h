// Where one rank's part of an all-reduce lies; what is asked is in schedule/call.h.
#pragma once

#include <cstdint>
#include <vector>

#include "base/fixed_tree.h"
#include "base/tile.h"
#include "schedule/chunk.h"

namespace rota::cpu {

// What is found out about the result on its way into the tensor.
struct BucketMeasures {
  std::vector<double> squares;  // by tile, in whole groups of the tree
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

struct AllReduceBuffers {
  void* data;  // num_elems elements of dtype, contiguous
  // Of reduce_bucket. What rounding the own contributions lost, in units of the result; added to
  // the next ones and then renewed. Null: no error feedback.
  float* residual = nullptr;
  BucketMeasures* measures = nullptr;
};

}  // namespace rota::cpu
