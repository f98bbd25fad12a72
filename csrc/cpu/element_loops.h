// Loops over elements: reduce several sources into one destination, convert between dtypes. One
// table of functions for each instruction set, chosen once at run time. No loop knows ranks or
// slots.
//
// All tables give the same bits: sources are added left to right in the accumulate dtype, nothing
// is contracted, and every rounding is to nearest, ties to even.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

#include "base/dtype.h"
#include "base/wire_format.h"

namespace rota::cpu {

// dst[i] = round(((srcs[0][i] op srcs[1][i]) op srcs[2][i]) ...), all of one dtype. kAvg is a sum
// divided by `divisor` before the rounding. dst may be one of srcs.
using ReduceFn = void (*)(const void* const* srcs, int num_srcs, void* dst, size_t num_elems,
                          int divisor);

// dst[i] = round(src[i]); dst and src do not overlap.
using ConvertFn = void (*)(const void* src, void* dst, size_t num_elems);

// Float32 to the wire format and back; null for what is no format.
struct WireLoops {
  // dst = round(src * factor), each block by its own scale.
  void (*encode)(const float* src, const WirePlace& dst, size_t num_elems, float factor);
  // The same, rounded to one of both neighbours, the nearer the likelier. The random numbers are a
  // function of key and place: of key + 0, key + 1, ...
  void (*encode_at_random)(const float* src, const WirePlace& dst, size_t num_elems, float factor,
                           uint32_t key);
  // dst = ((srcs[0] + srcs[1]) + srcs[2] ...) * factor
  void (*decode_sum)(const WirePlace* srcs, int num_srcs, float* dst, size_t num_elems,
                     float factor);
};

struct ElementLoops {
  std::string_view isa;
  ReduceFn reduce_fns[kNumDTypes][kNumReduceOps];  // nullptr where the op is not defined
  ConvertFn convert_fns[kNumDTypes][kNumDTypes];   // [from][to]; nullptr but among floating dtypes

  WireLoops wire_loops[kNumDTypes][2];  // [dtype][is_block_scaled]
  // Of squares in float64, in a fixed order. Not finite exactly if an element is not.
  double (*sum_of_squares)(const float* src, size_t num_elems);

  ReduceFn reduce(DType dtype, ReduceOp op) const {
    return reduce_fns[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  }
  ConvertFn convert(DType from, DType to) const {
    return convert_fns[static_cast<size_t>(from)][static_cast<size_t>(to)];
  }
  const WireLoops& wire(const WireFormat& format) const {
    return wire_loops[static_cast<size_t>(format.dtype)][format.is_block_scaled];
  }
};

// The best table that this CPU runs; ROTA_ISA=portable|avx2|avx512 asks for one by name.
// Throws Error(kValue) when the name is unknown or the CPU lacks it.
const ElementLoops& element_loops();
const ElementLoops& element_loops(std::string_view isa);

}  // namespace rota::cpu
