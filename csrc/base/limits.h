// Bounds that arrays on the stack rely on.
#pragma once

namespace rota {

// Ranks that share memory on one host; creating a larger group is refused.
inline constexpr int kMaxWorldSize = 64;

// Ranks of one process that share one kernel launch.
inline constexpr int kMaxLocalRanks = 16;

}  // namespace rota
