// Takes the place of csrc/cuda/device_block.h where g++ compiles the .cu files: their kernels
// become functions of the host of the same names, each call of which is one thread of a block
// (block.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>

#include "base/fixed_tree.h"
#include "cuda/conversions.h"
#include "cuda/words.h"
#include "simulated_gpu/block.h"

// What nvcc knows of itself.
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace rota::cuda {

static_assert(kTreeDoubles <= simulated_gpu::kSharedDoubles);

class DeviceBlock : public SoftwareConversions {
 public:
  int thread() const { return block_.thread(); }
  int num_threads() const { return block_.shape().num_threads; }
  int index() const { return block_.shape().index; }
  int num_blocks() const { return block_.shape().num_blocks; }
  int local_rank() const { return block_.shape().local_rank; }

  void sync() const { block_.all(true); }
  bool all(bool value) const { return block_.all(value); }

  template <uint32_t kLanes>
  uint32_t largest_of_lanes(uint32_t value) const {
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2) {
      value = std::max(value, from_lane<kLanes>(value, distance));
    }
    return value;
  }
  template <uint32_t kLanes, typename T>
  T from_lane(T value, uint32_t distance) const {
    static_assert(kLanes <= simulated_gpu::kMostLanes && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = block_.from_lane(kLanes, bits, distance);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  template <uint32_t kLanes, typename T>
  T from_place(T value, uint32_t place) const {
    return from_lane<kLanes>(value, static_cast<uint32_t>(thread()) % kLanes ^ place);
  }

  template <size_t kBytes>
  Words<kBytes> load(const std::byte* src) const {
    Words<kBytes> words;
    std::memcpy(&words, src, kBytes);
    return words;
  }
  template <size_t kBytes>
  void store(std::byte* dst, const Words<kBytes>& words) const {
    std::memcpy(dst, &words, kBytes);
  }

  struct Pair {
    uint64_t first;
    uint64_t second;
  };
  void store_pair(uint64_t* dst, uint64_t first, uint64_t second) const {
    std::atomic_ref(dst[1]).store(second, std::memory_order_relaxed);
    block_.dawdle();
    std::atomic_ref(dst[0]).store(first, std::memory_order_relaxed);
  }
  Pair load_pair(uint64_t* src) const {
    return {std::atomic_ref(src[0]).load(std::memory_order_relaxed),
            std::atomic_ref(src[1]).load(std::memory_order_relaxed)};
  }

  double* shared_doubles() const { return block_.shared_doubles(); }

  void pause() const { block_.pause(); }
  uint64_t now_ns() const {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

 private:
  simulated_gpu::Block& block_ = simulated_gpu::Block::current();
};

}  // namespace rota::cuda
