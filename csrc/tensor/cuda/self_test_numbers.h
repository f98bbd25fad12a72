// The contents of the self-test's tensors: numbers whose sums round, denormals, negative zeros, Inf
// and NaN, which kernels get wrong first. Knows nothing of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/wire_format.h"

namespace rota::tensors {

// Whether floats include Inf, NaN and any other bits. Denormals and negative zeros always occur.
enum class Extremes : bool { kNone, kSome };

// Elements of the dtype; the same for the same arguments.
std::vector<std::byte> plain_numbers(DType dtype, uint64_t num_elems, Extremes extremes,
                                     uint64_t seed);

// The same in a wire format, with the scales behind the elements.
std::vector<std::byte> numbers(const WireFormat& format, uint64_t num_elems, Extremes extremes,
                               uint64_t seed);

}  // namespace rota::tensors
