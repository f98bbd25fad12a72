// Launch requests that can be planned, for cases that change one thing of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launch_plan.h"
#include "schedule/tuning.h"

namespace rota::test {

// Nobody reads these: plans only compare addresses.
alignas(128) inline std::byte g_regions[4][128];
alignas(128) inline std::byte g_tensor[1 << 16];
inline uint32_t g_abort;
inline uint32_t g_num_left;
inline uint64_t g_failure;
inline uint64_t g_stall;

// Rank 1 of four, each with a GPU.
inline cuda::Peers good_peers() {
  cuda::Peers peers{
      .first_rank = 1,
      .geometry = {.world_size = 4, .num_channels = 3, .slot_bytes = 8192, .packet_bytes = 4096},
      .regions = {},
      .abort = &g_abort,
      .num_left = &g_num_left,
      .failure = &g_failure,
      .stall = &g_stall,
      .timeout_ns = 1};
  for (int rank = 0; rank < 4; ++rank) peers.regions[rank] = g_regions[rank];
  return peers;
}

// All ranks of the world, on one GPU.
inline cuda::Peers local_peers() {
  cuda::Peers peers = good_peers();
  peers.first_rank = 0;
  peers.num_local_ranks = 4;
  return peers;
}

inline cuda::LaunchRequest good_request(cuda::Kernel kernel) {
  return {.kernel = kernel,
          .input = {g_tensor},
          .output = {g_tensor},
          .num_elems = 1000,
          .source = 1,
          .destination = 2};
}

// Of two_shot_in_place on one GPU: the tensors, of which no two begin at one place, are mapped.
inline cuda::LaunchRequest mapped_request(cuda::MappedTensors& tensors) {
  cuda::LaunchRequest request = good_request(cuda::Kernel::kTwoShotInPlace);
  request.tensors = &tensors;
  for (size_t rank = 0; rank < 4; ++rank) {
    tensors.of[rank] = g_tensor + 4096 * rank;
    request.input[rank] = request.output[rank] = tensors.of[rank];
  }
  return request;
}

// Differs from every table entry.
inline constexpr schedule::Tuning kTuning{.max_low_latency_bytes = 4096,
                                          .max_one_shot_bytes = 16384,
                                          .num_channels = 3,
                                          .slot_bytes = 8192,
                                          .free_chunk_bytes = 12288,
                                          .free_threads = 96,
                                          .provenance = "of these cases"};

inline cuda::LaunchPlan plan_launch(const cuda::LaunchRequest& request, const cuda::Peers& peers) {
  return cuda::plan_launch(request, peers, kTuning);
}

}  // namespace rota::test
