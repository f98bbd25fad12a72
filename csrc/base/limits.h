// Bounds that arrays on the stack rely on.
#pragma once

namespace rota {

// Ranks that share memory on one host; a larger group is refused when it is made.
inline constexpr int kMaxWorldSize = 64;

// Ranks of one process whose kernels are one launch.
inline constexpr int kMaxLocalRanks = 16;

}  // namespace rota
