// For how long a rank on another host has been silent, and whether it counts as lost.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

#include "base/error.h"

namespace rota::hosts {

// 1500 ms; with the sign that is due and the network's delay, 2 s (DESIGN.md's contract). Or what
// ROTA_HOST_SILENCE_MS says, for ranks that may stand still for longer, as in a debugger or beside
// many others. Throws Error(kValue) if that is not a positive number.
inline std::chrono::milliseconds longest_silence() {
  const char* text = std::getenv("ROTA_HOST_SILENCE_MS");
  if (text == nullptr) return std::chrono::milliseconds(1500);
  const long value = std::strtol(text, nullptr, 10);
  if (value > 0) return std::chrono::milliseconds(value);
  throw Error(ErrorKind::kValue, join("rota: ROTA_HOST_SILENCE_MS is '", text,
                                      "', expected a positive number of milliseconds"));
}

// How long a rank that ends waits until its last signs and requests are sent.
inline constexpr std::chrono::milliseconds kLastWords{200};

class Silence {
 public:
  // Something of it has come.
  void end() {
    passed_ = {};
    last_look_ = Clock::now();
  }
  // Where whoever looks was held up, the thread that hears may have been, too: so much counts at
  // most from one look to the next.
  void look() {
    const auto now = Clock::now();
    passed_ += std::min<Clock::duration>(now - last_look_, kMostOfLook);
    last_look_ = now;
  }
  bool is_longer_than(std::chrono::milliseconds duration) const { return passed_ > duration; }
  bool is_too_long() const { return passed_ >= longest_; }
  std::string to_string() const {
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(passed_);
    return join("has given no sign of life for ", passed.count(), " ms");
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kMostOfLook{40};

  Clock::duration passed_{0};
  Clock::time_point last_look_ = Clock::now();
  std::chrono::milliseconds longest_ = longest_silence();
};

// What has become of a rank that is silent for too long.
inline constexpr std::string_view kVanished =
    "its host has vanished, or the network between the hosts is down";

}  // namespace rota::hosts
