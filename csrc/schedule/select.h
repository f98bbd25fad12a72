// Which all-reduce runs when the caller does not say: the one place, and a measured table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace rota::schedule {

enum class Algorithm : uint8_t { kOneShot, kTwoShot, kOrderedRing, kRing };

inline constexpr std::array<std::string_view, 4> kAlgorithmNames{"one_shot", "two_shot",
                                                                 "ordered_ring", "ring"};

constexpr std::string_view name(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

constexpr std::optional<Algorithm> parse_algorithm(std::string_view text) {
  for (size_t i = 0; i < kAlgorithmNames.size(); ++i) {
    if (kAlgorithmNames[i] == text) return static_cast<Algorithm>(i);
  }
  return std::nullopt;
}

// Messages of at most max_one_shot_bytes go one_shot, longer ones two_shot; both give the same
// bits, so the choice can never show in a result.
struct Choice {
  int max_world_size;
  uint64_t max_one_shot_bytes;
};

inline constexpr Choice kMeasured[] = {
    {2, UINT64_MAX},
    {16, 64 << 10},
};

constexpr Algorithm select(int world_size, uint64_t num_wire_bytes) {
  for (const Choice& choice : kMeasured) {
    if (world_size <= choice.max_world_size) {
      return num_wire_bytes <= choice.max_one_shot_bytes ? Algorithm::kOneShot
                                                         : Algorithm::kTwoShot;
    }
  }
  return Algorithm::kTwoShot;
}

}  // namespace rota::schedule
