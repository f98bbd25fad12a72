// Timeouts that can be added to a clock.
#pragma once

#include <chrono>

namespace rota {

// Clocks count nanoseconds in 64 bits, which end after 292 years.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24) * 36500;

// A caller's timeout, or the longest where that is less. What has made milliseconds of a Python
// timedelta counts its microseconds in 64 bits, and so makes a negative number of timedelta.max.
constexpr std::chrono::milliseconds usable_timeout(std::chrono::milliseconds timeout) {
  const bool is_usable = -kLongestTimeout <= timeout && timeout <= kLongestTimeout;
  return is_usable ? timeout : kLongestTimeout;
}

}  // namespace rota
