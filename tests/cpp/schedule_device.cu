// The schedules as device code: nvcc compiles the kernel, which calls every function of
// csrc/schedule/ that the CUDA kernels use. nvcc and g++ both evaluate the assertions, so host and
// device agree on the results.
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "schedule/rank_set.h"
#include "schedule/ring.h"
#include "schedule/select.h"

namespace rota::schedule {

// ---- chunk.h: 1000 elements in 3 shards of whole granules of 64, and in chunks of 300
static_assert(ceil_div(0, 64) == 0 && ceil_div(64, 64) == 1 && ceil_div(65, 64) == 2);
static_assert(min_of(3, 5) == 3 && min_of(5, 3) == 3);
static_assert(shard_length(1000, 3, 64) == 384 && shard_length(0, 3, 64) == 0);
static_assert(even_shard(1000, 3, 0, 64).begin == 0 && even_shard(1000, 3, 0, 64).num_elems == 384);
static_assert(even_shard(1000, 3, 2, 64).begin == 768 &&
              even_shard(1000, 3, 2, 64).num_elems == 232);
static_assert(even_shard(100, 3, 2, 64).num_elems == 0);
static_assert(even_shard(uint64_t{1} << 40, 2, 1, 64).begin == uint64_t{1} << 39);
static_assert(chunk_of(1000, 300, 3).begin == 900 && chunk_of(1000, 300, 3).num_elems == 100);
static_assert(chunk_of(1000, 300, 4).num_elems == 0);
// Shards of 384, 384 and 232 elements, in chunks of 128.
static_assert(num_chunks_of_shards(1000, 3, 128, 64) == 3 &&
              num_chunks_of_shards(0, 3, 128, 64) == 0);
static_assert(chunk_of_even_shard(1000, 3, 1, 128, 2, 64).begin == 640);
static_assert(chunk_of_even_shard(1000, 3, 2, 128, 1, 64).num_elems == 104);
static_assert(chunk_of_even_shard(1000, 3, 2, 128, 2, 64).num_elems == 0);

// ---- ring.h
static_assert(next_rank(3, 4) == 0 && previous_rank(0, 4) == 3);
static_assert(ring_num_steps(1) == 0 && ring_num_steps(4) == 6);
static_assert(ring_step(1, 4, 0).send_shard == 1 && ring_step(1, 4, 0).recv_shard == 0);
static_assert(ring_step(1, 4, 1).action == RingAction::kReduce);
static_assert(ring_step(1, 4, 2).action == RingAction::kFinish);
static_assert(ring_step(1, 4, 3).action == RingAction::kCopy);
static_assert(ordered_ring_num_steps(4, 5) == 11);
static_assert(ordered_ring_step(2, 4, 5, 2).partial_chunk == 0);
static_assert(ordered_ring_step(2, 4, 5, 6).result_chunk == 0);
static_assert(ordered_ring_step(3, 4, 5, 8).result_chunk == -1);

// ---- rank_set.h: 6 ranks in groups of 2
static_assert(nobody().num_ranks == 0 && only(3).rank_at(0) == 3 && everyone(4).rank_at(3) == 3);
static_assert(group_of(3, 2).rank_at(0) == 2 && group_of(3, 2).place_of(3) == 1);
static_assert(across_groups(3, 6, 2).rank_at(2) == 5 && across_groups(3, 6, 2).place_of(3) == 1);

// ---- direct.h
static_assert(two_shot_num_steps(3) == 4);
static_assert(two_shot_step(3, 0).contribute_round == 0 && two_shot_step(3, 0).reduce_round == -1);
static_assert(two_shot_step(3, 3).contribute_round == -1 && two_shot_step(3, 3).reduce_round == 2);
static_assert(rotated_peer(3, 4, 0) == 0 && rotated_peer(3, 4, 2) == 2);

// ---- select.h: on the host only, where launches are decided
static_assert(select(2, 1024) == Algorithm::kOneShot);

#if defined(__CUDACC__)
// One thread for each step of one rank; the sums only keep calls from being optimised away.
__global__ void schedule_kernel(int rank, int world_size, uint64_t num_elems, uint64_t* sums) {
  const int step = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto num_shards = static_cast<uint64_t>(world_size);
  const auto index = static_cast<uint64_t>(step);
  const uint64_t shard_elems = shard_length(num_elems, num_shards, 64);
  const Range shard = shard_of(num_elems, shard_elems, rank);
  const Range chunk = chunk_of(num_elems, 4096, index);
  const Range part = chunk_of_shard(num_elems, shard_elems, rank, 4096, index);
  const RingStep ring = ring_step(rank, world_size, step);
  const OrderedRingStep ordered = ordered_ring_step(rank, world_size, 16, step);
  const TwoShotStep two_shot = two_shot_step(16, step);
  const RankSet group = group_of(rank, 2), across = across_groups(rank, world_size, 2);
  const uint64_t bounds =
      shard.begin + shard.num_elems + chunk.begin + chunk.num_elems + part.begin + part.num_elems;
  const int ranks = next_rank(rank, world_size) + previous_rank(rank, world_size) +
                    rotated_peer(rank, world_size, step % world_size) + ring.send_shard +
                    ring.recv_shard + static_cast<int>(ring.action) + group.place_of(rank) +
                    across.rank_at(step) + everyone(world_size).num_ranks + only(rank).first +
                    nobody().stride;
  const int64_t steps = ordered.partial_chunk + ordered.result_chunk + two_shot.contribute_round +
                        two_shot.reduce_round + ring_num_steps(world_size) +
                        ordered_ring_num_steps(world_size, 16) + two_shot_num_steps(16);
  sums[step] = bounds + static_cast<uint64_t>(ranks) + static_cast<uint64_t>(steps) +
               min_of(ceil_div(num_elems, num_shards), num_elems);
}
#endif

}  // namespace rota::schedule
