// Chooses the all-reduce algorithm when the caller names none, from measured tables; the table for
// GPUs is in schedule/tuning.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "schedule/tuning.h"

namespace rota::schedule {

enum class Algorithm : uint8_t {
  kOneShot,
  kTwoShot,
  kOrderedRing,
  kRing,
  kLowLatency,  // on GPUs only
  kTwoLevel,    // on the CPU only, where ranks are on several NUMA nodes
};

inline constexpr std::array<std::string_view, 6> kAlgorithmNames{
    "one_shot", "two_shot", "ordered_ring", "ring", "low_latency", "two_level"};

constexpr std::string_view name(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

// Whether partial sums travel from rank to rank.
constexpr bool is_ring(Algorithm algorithm) {
  return algorithm == Algorithm::kRing || algorithm == Algorithm::kOrderedRing;
}

// Messages of at most max_one_shot_bytes use one_shot, longer ones two_shot. Both give the same
// bits, so the choice never changes a result.
struct Choice {
  int max_world_size;
  uint64_t max_one_shot_bytes;
};

// The size at which both take equally long, by `benchmarks/collectives.py --algorithms
// one_shot,two_shot`. 2 ranks, whose messages change hands, AMD EPYC (Zen 4) with 2 cores,
// 2026-11-27: one_shot takes 1.1 us at 4 KiB, two_shot 1.5; at 64 KiB both 4 to 5, and from 256 KiB
// on two_shot takes less. 4 ranks, Xeon with 2 cores, 2026-11-21: 7 us between 8 and 16 KiB. More
// ranks than cores were measured only on that machine; with a core for each rank the second row may
// be too high.
inline constexpr Choice kMeasured[] = {
    {2, 64 << 10},
    {64, 8 << 10},
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

// two_level replaces two_shot from this length on, where the order allows it and less crosses
// between nodes. Not measured, for want of a machine with several nodes: two_level has three waits
// more in a row, which take a few microseconds, where a core takes tens of them to read so much.
inline constexpr uint64_t kMinTwoLevelBytes = 256 << 10;

// The choice on GPUs. most_packet_bytes: the longest message that low_latency takes.
constexpr Algorithm select_on_gpu(const Tuning& tuning, int world_size, uint64_t num_wire_bytes,
                                  uint64_t most_packet_bytes) {
  const uint64_t most_low_latency_bytes = std::min(tuning.max_low_latency_bytes, most_packet_bytes);
  if (num_wire_bytes <= most_low_latency_bytes) return Algorithm::kLowLatency;
  const bool is_short =
      num_wire_bytes * static_cast<uint64_t>(world_size) <= tuning.max_one_shot_bytes;
  return is_short ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

}  // namespace rota::schedule
