// The results that the element loops must give, one scalar at a time, from the definitions: formats
// from their bit widths, roundings from nearbyint, sums in the accumulate dtype from left to right.
// Slow, and shares no code with csrc/cpu/.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace rota::test {

// Elements are passed as their bits, in the low end of a word.
double to_double(DType dtype, uint64_t bits);

// The float of `dtype` nearest to value, ties to even: one rounding.
uint64_t round_to(DType dtype, double value);

bool is_nan(DType dtype, uint64_t bits);

// Equal bits, or both NaN: NaN payloads may differ.
bool is_same(DType dtype, uint64_t a, uint64_t b);
inline bool is_same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// (((srcs[0] op srcs[1]) op srcs[2]) ...), for kAvg divided by `divisor`, rounded once; quotients
// of integers are truncated.
uint64_t reduce_scalars(DType dtype, ReduceOp op, std::span<const uint64_t> srcs, int divisor);

// The same along a balanced tree, whose first half has one more if they are odd in number.
uint64_t reduce_in_tree(DType dtype, ReduceOp op, std::span<const uint64_t> srcs);

uint64_t load_bits(DType dtype, const void* base, uint64_t index);
void store_bits(DType dtype, void* base, uint64_t index, uint64_t bits);

// The bits of an integer in dtype: exact or, for integer dtypes, wrapped; for bool, whether it is
// not 0.
uint64_t bits_of_integer(DType dtype, int64_t value);

}  // namespace rota::test
