// How long a rank on another host may be silent before it counts as lost.
#pragma once

#include <chrono>

namespace rota::hosts {

// 1500 ms, or what ROTA_HOST_SILENCE_MS says. Throws Error(kValue) if that is not a positive
// number.
std::chrono::milliseconds longest_silence();

// How long a rank that ends waits until its last signs and requests are sent.
inline constexpr std::chrono::milliseconds kLastWords{200};

}  // namespace rota::hosts
