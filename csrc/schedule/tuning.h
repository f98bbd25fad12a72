// The tuning of collectives on GPUs, and where each number comes from: the one table, which
// select.h and cuda/launch_plan.h read. Host only.
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
  kLocal,   // ranks of one launch on one GPU, or a single rank
  kNvlink,  // every pair of GPUs by NVLink
  kPcie,    // some pair by PCIe, or unknown
};

inline constexpr std::array<std::string_view, 3> kTopologyNames{"local", "nvlink", "pcie"};

constexpr std::string_view name(Topology topology) {
  return kTopologyNames[static_cast<size_t>(topology)];
}

// All ranks of a communicator share one tuning: ranks with different tunings would run different
// algorithms on links of different sizes.
struct Tuning {
  uint64_t max_low_latency_bytes;  // of a message; up to this size all-reduce uses low_latency
  uint64_t max_one_shot_bytes;     // of all ranks' messages; up to it one_shot, else two_shot
  int num_channels;                // blocks of each rank; 0: as many as can be resident together
  size_t slot_bytes;               // of one link in one channel
  // For blocks that never wait (two_shot_in_place of local ranks): the bytes of each tensor that a
  // block takes, and its number of threads.
  size_t free_chunk_bytes;
  int free_threads;
  std::string_view provenance;  // machine, date and command; valid for the life of the program
};

struct TuningRow {
  std::string_view gpu;  // prefix of the device's name (cudaGetDeviceProperties); "": any
  Topology topology;
  int max_world_size;
  Tuning tuning;
};

inline constexpr std::string_view kFromBounds = "not measured: from the bounds in csrc/README.md";

// low_latency saves the latency of a flag sent after the data and costs twice the bytes; one_shot
// saves a second wait and costs world_size / 2 times the bytes. A link of 450 GB/s needs 0.5 MB in
// flight, which 16 channels provide.
inline constexpr Tuning kLinkTuning{.max_low_latency_bytes = 16 << 10,
                                    .max_one_shot_bytes = 256 << 10,
                                    .num_channels = 16,
                                    .slot_bytes = 128 << 10,
                                    .free_chunk_bytes = 16 << 10,
                                    .free_threads = 128,
                                    .provenance = kFromBounds};

// two_shot_in_place never waits and moves the minimum, so local ranks gain nothing from another
// algorithm. Several of its blocks share a multiprocessor, so memory stays busy while one starts,
// and each takes so little that all end at about the same time. With 16 KiB of each tensor per
// block, 128 MB (2 ranks) are 4096 blocks, and 62 us by the bounds of cost.h; an H200
// runs 528 blocks at a time, so 8 run one after another.
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

// Returns the matching row with the longest GPU name and, among those, the fewest ranks; none if no
// row matches.
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

// Every GPU and every supported number of ranks has a row.
static_assert(find_tuning("", Topology::kLocal, kMaxWorldSize) &&
              find_tuning("", Topology::kNvlink, kMaxWorldSize) &&
              find_tuning("", Topology::kPcie, kMaxWorldSize));

// What one rank knows: its GPU's name, and how it reaches the other GPUs.
struct GpuPlace {
  std::string_view gpu;
  Topology topology;
};

// What holds for all ranks of a communicator, the same on each: the GPU's name if all share it,
// else none; and the slowest topology that any rank sees.
constexpr GpuPlace common_place(std::span<const GpuPlace> places) {
  GpuPlace common = places.front();
  for (const GpuPlace& place : places) {
    if (place.gpu != common.gpu) common.gpu = "";
    common.topology = std::max(common.topology, place.topology);
  }
  return common;
}

}  // namespace rota::schedule
