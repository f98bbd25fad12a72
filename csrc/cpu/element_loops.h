// Loops over elements: reduce several sources into one destination, convert between dtypes. There
// is one table of functions per instruction set, chosen once at run time. The loops know neither
// ranks nor slots.
//
// All tables give the same bits: sources are added in the accumulate dtype, without contraction to
// fused multiply-adds, and every rounding is to nearest, ties to even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/wire_format.h"

namespace rota::cpu {

// What a sum adds, in the order that schedule/sum_order.h describes; none: left to right.
template <typename Source>
struct Summands {
  const Source* srcs;
  int num;
  const uint8_t* num_additions = nullptr;  // by source
};

// dst[i] = round(srcs[0][i] op srcs[1][i] op srcs[2][i] ...), all of one dtype. kAvg is a sum
// divided by `divisor` before the rounding; of integers, which wrap, the quotient is truncated. dst
// may be one of the sources.
using ReduceFn = void (*)(const Summands<const void*>& summands, void* dst, size_t num_elems,
                          int divisor);

// dst[i] = round(src[i]); dst and src do not overlap.
using ConvertFn = void (*)(const void* src, void* dst, size_t num_elems);

// Float32 to a wire format and back; null for a dtype that is no wire format.
struct WireLoops {
  // dst = round(src * factor), each block by its own scale.
  void (*encode)(const float* src, const WirePlace& dst, size_t num_elems, float factor);
  // The same with stochastic rounding: to one of the two neighbours, more likely to the nearer one.
  // Element i uses the random number of key + i.
  void (*encode_at_random)(const float* src, const WirePlace& dst, size_t num_elems, float factor,
                           uint32_t key);
  // dst = (srcs[0] + srcs[1] + srcs[2] ...) * factor
  void (*decode_sum)(const Summands<WirePlace>& summands, float* dst, size_t num_elems,
                     float factor);
};

// One step of an optimizer, with the numbers that are the same for all elements of a parameter.
struct UpdateStep {
  enum class Kind : uint8_t { kAdam, kSgd };

  Kind kind;
  float gradient_factor;   // multiplies the gradient first; negative to maximize
  float l2 = 0;            // of the parameter, added to the gradient
  float kept = 1;          // multiplies the parameter: decoupled weight decay
  float size;              // of the step: lr, divided by Adam's first bias correction
  float momentum;          // Adam: beta1
  float fresh;             // what the gradient adds to the momentum: 1 - beta1, or 1 - dampening
  float beta2 = 0;         // Adam only, as the rest
  float fresh_square = 0;  // 1 - beta2
  float correction = 1;    // the root of the second bias correction
  float eps = 0;
  bool is_nesterov = false;  // SGD only
  bool is_first = false;     // likewise: the momentum is the gradient
};

// The state of so many elements; null for what the step has not.
struct UpdateState {
  const float* gradients;
  float* parameters;
  float* momentum;  // Adam: exp_avg
  float* squares;   // exp_avg_sq
  float* largest;   // max_exp_avg_sq
};

struct ElementLoops {
  std::string_view isa;
  ReduceFn reduce_fns[kNumDTypes][kNumReduceOps];  // nullptr where the op is not defined
  ConvertFn convert_fns[kNumDTypes][kNumDTypes];   // [from][to]; nullptr unless both are floating

  WireLoops wire_loops[kNumDTypes][2];  // [dtype][is_block_scaled]
  // Sums in float64, in a fixed order. The result is finite if and only if all elements are.
  double (*sum_of_squares)(const float* src, size_t num_elems);
  // Adam (Kingma & Ba 2014), with AMSGrad (Reddi et al. 2018) if `largest` is there, and decoupled
  // weight decay (Loshchilov & Hutter 2017) by `kept`; or SGD with momentum. As torch.optim's.
  void (*update)(const UpdateStep& step, const UpdateState& state, size_t num_elems);

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

// The best table for this CPU, unless ROTA_ISA or `isa` names one: portable, avx2 or avx512. Throws
// Error(kValue) when the name is unknown or the CPU lacks it.
const ElementLoops& element_loops();
const ElementLoops& element_loops(std::string_view isa);

}  // namespace rota::cpu
