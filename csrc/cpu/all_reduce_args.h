// What one rank hands to an all-reduce.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/fixed_tree.h"
#include "base/tile.h"
#include "base/wire_format.h"
#include "schedule/chunk.h"
#include "schedule/select.h"

namespace rota::cpu {

// What happens to a gradient bucket on its way through an all-reduce, besides the sum.
struct BucketPass {
  float contribution_factor = 1;  // of each rank's gradients, before they are rounded
  float divisor = 1;              // of the sum
  float result_factor = 1;        // of the result, after it is rounded
  // Error feedback: what rounding the own contributions lost, in units of the result; added to the
  // next ones and then renewed. Null: none.
  float* residual = nullptr;
  std::optional<uint64_t> stochastic_seed;  // none: to nearest
};

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

struct AllReduceArgs {
  void* data;  // num_elems elements of dtype, contiguous
  uint64_t num_elems;
  DType dtype;
  ReduceOp op;
  WireFormat wire;  // what contributions and results are rounded to
  DType hop;        // what rings pass partial sums on in
  schedule::Algorithm algorithm;
  // For gradient buckets; both or neither.
  const BucketPass* pass = nullptr;
  BucketMeasures* measures = nullptr;
};

}  // namespace rota::cpu
