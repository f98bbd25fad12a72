// Runs kernel bodies on the host: a world of ranks, each with its own blocks of threads and its own
// region, runs one launch after another as a stream would.
#pragma once

#include <algorithm>

#include "cuda/peers.h"
#include "host_block.h"
#include "ranks.h"

namespace rota::test {

struct GridShape {
  int world_size = 2;
  bool is_one_launch = false;  // one launch for all ranks; otherwise one per rank
  int num_blocks = 2;
  int num_channels = 0;  // 0: equal to num_blocks
  int num_threads = 8;   // of each block; raised to world_size (links.h)
  size_t slot_bytes = 1024;
  size_t packet_bytes = 1024;
  std::chrono::nanoseconds timeout = kPatience;
};

inline constexpr int kNobody = -1;

// Of launches that need nothing before or after them.
struct PlainWork {
  int late_rank(int) const { return kNobody; }
  void prepare(int, int) const {}
  bool finish(int, int) const { return true; }
};

class HostGrid {
 public:
  explicit HostGrid(const GridShape& shape)
      : shape_(with_a_thread_for_each_rank(shape)),
        geometry_{shape.world_size, shape.num_channels == 0 ? shape.num_blocks : shape.num_channels,
                  shape.slot_bytes, shape.packet_bytes} {
    ranks_.resize(static_cast<size_t>(shape.world_size));
    for (Rank& rank : ranks_) rank.region.resize(geometry_.num_bytes() / sizeof(Line));
    const auto timeout_ns = static_cast<uint64_t>(shape.timeout.count());
    for (int i = 0; i < shape.world_size; ++i) {
      Rank& rank = at(i);
      rank.peers = {.first_rank = shape.is_one_launch ? 0 : i,
                    .num_local_ranks = shape.is_one_launch ? shape.world_size : 1,
                    .geometry = geometry_,
                    .regions = {},
                    .abort = &rank.abort,
                    .num_left = &rank.num_left,
                    .failure = &rank.failure,
                    .stall = &rank.stall,
                    .stall_after_ns = timeout_ns / 2,
                    .timeout_ns = timeout_ns};
      for (size_t peer = 0; peer < ranks_.size(); ++peer) {
        rank.peers.regions[peer] = reinterpret_cast<std::byte*>(ranks_[peer].region.data());
      }
    }
  }

  const GridShape& shape() const { return shape_; }
  cuda::Peers& peers(int rank) { return at(rank).peers; }
  cuda::Failure failure(int rank) { return cuda::Failure::unpack(at(rank).failure); }
  cuda::Failure stall(int rank) { return cuda::Failure::unpack(at(rank).stall); }
  // Whether a rank's region is still all zeroes, as before the first launch.
  bool is_untouched(int rank) {
    const auto is_zero = [](const Line& line) {
      return std::ranges::all_of(line.bytes, [](std::byte byte) { return byte == std::byte{0}; });
    };
    return std::ranges::all_of(at(rank).region, is_zero);
  }
  void abort_everywhere() {
    for (Rank& rank : ranks_) std::atomic_ref(rank.abort).store(1, std::memory_order_relaxed);
  }

  // Runs the launches number = 0, 1, ... num_launches - 1 of all ranks, each with blocks in
  // [0, work.num_blocks(number)):
  //   work.prepare(rank, number)        one thread of the rank, before the launch begins
  //   work.launch(block, rank, number)  every thread of every block
  //   work.finish(rank, number)         one thread of the rank, after the launch; false: the rank
  //                                     stops here, and the others' waits are aborted
  //   work.late_rank(number)            which rank is late, if any; only tests of order need one
  // Between these steps all threads of a rank meet at a barrier, as between kernels of a stream.
  // Ranks synchronise only through their links, so that nothing else orders what they do; but the
  // ranks of one launch share one stream.
  template <typename Work>
  void run(int num_launches, Work& work) {
    const int threads_of_rank = shape_.num_blocks * shape_.num_threads;
    const int num_streams = shape_.is_one_launch ? 1 : shape_.world_size;
    const int threads_of_stream = shape_.world_size / num_streams * threads_of_rank;
    std::vector<std::unique_ptr<HostBarrier>> streams;
    std::vector<std::vector<std::unique_ptr<SharedBlock>>> blocks;
    for (int i = 0; i < num_streams; ++i) {
      streams.push_back(std::make_unique<HostBarrier>(threads_of_stream));
    }
    for (int rank = 0; rank < shape_.world_size; ++rank) {
      blocks.emplace_back();
      for (int i = 0; i < shape_.num_blocks; ++i) {
        blocks.back().push_back(std::make_unique<SharedBlock>(shape_.num_threads));
      }
    }
    run_threads(shape_.world_size * threads_of_rank, [&](int id) {
      const int rank = id / threads_of_rank;
      const int index = id % threads_of_rank / shape_.num_threads;
      const int thread = id % shape_.num_threads;
      const bool is_first = id % threads_of_rank == 0;
      SharedBlock& shared = *blocks[static_cast<size_t>(rank)][static_cast<size_t>(index)];
      HostBarrier& stream = *streams[static_cast<size_t>(id / threads_of_stream)];
      for (int number = 0; number < num_launches; ++number) {
        if (is_first) work.prepare(rank, number);
        stream.arrive_and_wait();
        const int num_blocks = work.num_blocks(number);
        const uint64_t seed = static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(id);
        const int local_rank = rank - peers(rank).first_rank;
        const HostBlock block(shared, thread, shape_.num_threads, index, num_blocks, local_rank,
                              seed, work.late_rank(number) == rank ? Pace::kLate : Pace::kQuick);
        if (index < num_blocks) work.launch(block, rank, number);
        stream.arrive_and_wait();
        const bool goes_on = !is_first || work.finish(rank, number);
        if (!goes_on) abort_everywhere();
        if (!stream.arrive_and_wait(goes_on)) return;
      }
    });
  }

 private:
  static GridShape with_a_thread_for_each_rank(GridShape shape) {
    shape.num_threads = std::max(shape.num_threads, shape.world_size);
    return shape;
  }

  struct alignas(transport::kDeviceLineBytes) Line {
    std::byte bytes[transport::kDeviceLineBytes];
  };
  struct Rank {
    std::vector<Line> region;  // zeroed
    uint32_t abort = 0;
    uint32_t num_left = 0;
    uint64_t failure = 0;
    uint64_t stall = 0;
    cuda::Peers peers{};
  };

  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }

  GridShape shape_;
  transport::DeviceGeometry geometry_;
  std::vector<Rank> ranks_;
};

}  // namespace rota::test
