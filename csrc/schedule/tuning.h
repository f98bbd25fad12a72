// What collectives on GPUs are tuned by, and where each number comes from: the one table, which
// select.h and cuda/launch_plan.h read. On the host only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/limits.h"

namespace rota::schedule {

// How the ranks of a collective reach each other.
enum class Topology : uint8_t {
  kLocal,   // ranks of one launch on one GPU, or a rank alone
  kNvlink,  // every pair of GPUs by NVLink
  kPcie,    // some pair by PCIe, or nobody knows
};

inline constexpr std::array<std::string_view, 3> kTopologyNames{"local", "nvlink", "pcie"};

constexpr std::string_view name(Topology topology) {
  return kTopologyNames[static_cast<size_t>(topology)];
}

constexpr std::optional<Topology> parse_topology(std::string_view text) {
  for (size_t i = 0; i < kTopologyNames.size(); ++i) {
    if (kTopologyNames[i] == text) return static_cast<Topology>(i);
  }
  return std::nullopt;
}

// Ranks whose tunings differ would run different algorithms on links of different lengths, so all
// ranks of a communicator have one.
struct Tuning {
  uint64_t max_low_latency_bytes;  // of a message; up to there all-reduce is low_latency
  uint64_t max_one_shot_bytes;     // of all ranks' messages together; one_shot, else two_shot
  int num_channels;                // blocks of each rank; 0: as many as are resident together
  size_t slot_bytes;               // of one link in one channel
  // Of blocks that wait for nobody, two_shot_in_place of local ranks: what each takes of a tensor,
  // and how many threads it has.
  size_t free_chunk_bytes;
  int free_threads;
  std::string_view provenance;  // which machine, when, by which command; it outlives the program
};

struct TuningRow {
  std::string_view gpu;  // how the device's name begins (cudaGetDeviceProperties); "": any
  Topology topology;
  int max_world_size;
  Tuning tuning;
};

inline constexpr std::string_view kFromBounds = "not measured: from the bounds in csrc/README.md";

// low_latency saves a flag's way behind the data and costs twice the bytes, one_shot saves a second
// wait and costs world_size / 2 as many. A link of 450 GB/s needs 0.5 MB on its way, which 16
// channels carry.
inline constexpr Tuning kLinkTuning{.max_low_latency_bytes = 16 << 10,
                                    .max_one_shot_bytes = 256 << 10,
                                    .num_channels = 16,
                                    .slot_bytes = 128 << 10,
                                    .free_chunk_bytes = 16 << 10,
                                    .free_threads = 128,
                                    .provenance = kFromBounds};

// two_shot_in_place waits for nobody and moves the least there is, so local ranks gain nothing by
// another algorithm. Its blocks share a multiprocessor, so that the others keep memory busy while
// one starts, and each takes so little that all end together: 16 KiB of each tensor are 128 MB and
// 62 us as 4096 blocks of 2 ranks, 8 of them one after the other in each place of an H200 (528).
inline constexpr Tuning kLocalTuning{.max_low_latency_bytes = 0,
                                     .max_one_shot_bytes = 0,
                                     .num_channels = 0,
                                     .slot_bytes = 128 << 10,
                                     .free_chunk_bytes = 16 << 10,
                                     .free_threads = 128,
                                     .provenance = kFromBounds};

inline constexpr TuningRow kTunings[] = {
    {"", Topology::kLocal, kMaxWorldSize, kLocalTuning},
    {"", Topology::kNvlink, kMaxWorldSize, kLinkTuning},
    {"", Topology::kPcie, kMaxWorldSize, kLinkTuning},
};

// Of the rows that fit, the one of the longest name, and among those of the fewest ranks; none
// where no row fits.
constexpr std::optional<Tuning> find_tuning(std::string_view gpu, Topology topology, int world_size,
                                            std::span<const TuningRow> rows = kTunings) {
  std::optional<TuningRow> found;
  for (const TuningRow& row : rows) {
    const bool fits = gpu.starts_with(row.gpu) && topology == row.topology && world_size >= 1 &&
                      world_size <= row.max_world_size;
    if (!fits) continue;
    const bool is_closer =
        !found || row.gpu.size() > found->gpu.size() ||
        (row.gpu.size() == found->gpu.size() && row.max_world_size < found->max_world_size);
    if (is_closer) found = row;
  }
  return found ? std::optional(found->tuning) : std::nullopt;
}

// For any GPU and any number of ranks that rota takes, there is a row.
static_assert(find_tuning("", Topology::kLocal, kMaxWorldSize) &&
              find_tuning("", Topology::kNvlink, kMaxWorldSize) &&
              find_tuning("", Topology::kPcie, kMaxWorldSize));

// What one rank knows: its GPU's name, and the way to the others' GPUs.
struct GpuPlace {
  std::string_view gpu;
  Topology topology;
};

// What holds for all ranks of a communicator, and is the same on each: a name that all share, or
// none, and NVLink where everybody sees nothing else.
constexpr GpuPlace common_place(std::span<const GpuPlace> places) {
  GpuPlace common = places.front();
  for (const GpuPlace& place : places) {
    if (place.gpu != common.gpu) common.gpu = "";
    common.topology = std::max(common.topology, place.topology);
  }
  return common;
}

}  // namespace rota::schedule
