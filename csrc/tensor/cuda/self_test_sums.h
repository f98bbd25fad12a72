// The sums that the self-test expects of each kernel, from the CPU's loops in the kernel's order of
// additions. Knows nothing of launches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/wire_format.h"
#include "cuda/launch_plan.h"

namespace rota::tensors {

// Ranks of one launch: hierarchical needs groups of more than one, and the order of a sum only
// shows with three ranks or more.
inline constexpr int kSelfTestRanks = 4;
inline constexpr int kSelfTestGroupSize = 2;  // of hierarchical
inline constexpr int kSelfTestDivisor = 3;    // of averages; its reciprocal is not exact

// Each rank's elements in a wire format.
using Contributions = std::array<std::vector<std::byte>, kSelfTestRanks>;

// All elements of the all-reduced contributions; those of a rank's shard are what a reduce-scatter
// gives it.
std::vector<std::byte> all_reduced(cuda::Kernel kernel, cuda::Sums sums, const WireFormat& format,
                                   ReduceOp op, uint64_t num_elems, Contributions& contributions);

}  // namespace rota::tensors
