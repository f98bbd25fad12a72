// A stand-in for a block of GPU threads, to run kernel bodies on the host: every GPU thread is a
// host thread, with the barriers and exchanges of its block, so that ThreadSanitizer checks whether
// the bodies order their accesses. csrc/cuda/device_block.h is the counterpart on the GPU.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "base/fixed_tree.h"
#include "cuda/conversions.h"
#include "cuda/words.h"
#include "random.h"

namespace rota::test {

// A barrier for a fixed number of threads, which returns the logical AND of their values. It sleeps
// in the kernel: with many threads for each core, to yield until all have come takes longer.
// std::atomic::wait uses a table of waiters that would also order threads of different barriers.
class HostBarrier {
 public:
  explicit HostBarrier(int num_threads) : num_threads_(num_threads) {}

  bool arrive_and_wait(bool value = true) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    auto& all = all_[round % 2];
    if (!value) all.store(false, std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      all_[(round + 1) % 2].store(true, std::memory_order_relaxed);
      num_arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, num_threads_, nullptr, nullptr, 0);
    } else {
      while (round_.load(std::memory_order_acquire) == round) {
        syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
      }
    }
    return all.load(std::memory_order_relaxed);
  }

 private:
  const int num_threads_;
  std::atomic<uint32_t> round_ = 0;
  std::atomic<int> num_arrived_ = 0;
  std::array<std::atomic<bool>, 2> all_{true, true};
};

// State that the threads of one block share.
class SharedBlock {
 public:
  explicit SharedBlock(int num_threads) : barrier(num_threads) {
    for (int lanes = 1; lanes <= kMostLanes; lanes *= 2) {
      values[static_cast<size_t>(lanes)].resize(static_cast<size_t>(num_threads));
      for (int i = 0; i < num_threads / lanes; ++i) {
        groups[static_cast<size_t>(lanes)].push_back(std::make_unique<HostBarrier>(lanes));
      }
    }
  }

  // Neighbours exchange values in groups of 1, 2, 4, ... threads, up to a warp.
  static constexpr int kMostLanes = 32;

  HostBarrier barrier;
  std::array<std::vector<std::unique_ptr<HostBarrier>>, kMostLanes + 1> groups;  // by lanes
  std::array<double, kTreeDoubles> doubles;
  // By lanes and thread; two values, used in turn, so that one barrier per exchange suffices.
  std::array<std::vector<std::array<uint64_t, 2>>, kMostLanes + 1> values;
};

enum class Pace {
  kQuick,  // yields now and then
  kLate,   // also naps: before its first barrier and its first packet, and at random
};

class HostBlock : public cuda::SoftwareConversions {
 public:
  HostBlock(SharedBlock& shared, int thread, int num_threads, int index, int num_blocks,
            int local_rank, uint64_t seed, Pace pace)
      : shared_(shared),
        thread_(thread),
        num_threads_(num_threads),
        index_(index),
        num_blocks_(num_blocks),
        local_rank_(local_rank),
        random_(seed),
        pace_(pace) {}

  int thread() const { return thread_; }
  int num_threads() const { return num_threads_; }
  int index() const { return index_; }
  int num_blocks() const { return num_blocks_; }
  int local_rank() const { return local_rank_; }

  void sync() const { all(true); }
  bool all(bool value) const {
    nap_before(first_barrier_);
    dawdle();
    const bool result = shared_.barrier.arrive_and_wait(value);
    dawdle();
    return result;
  }

  template <uint32_t kLanes>
  uint32_t largest_of_lanes(uint32_t value) const {
    exchange<kLanes>(value);
    uint32_t largest = 0;
    const int first = thread_ / static_cast<int>(kLanes) * static_cast<int>(kLanes);
    for (uint32_t i = 0; i < kLanes; ++i) {
      const uint64_t other = value_of<kLanes>(first + static_cast<int>(i));
      largest = std::max(largest, static_cast<uint32_t>(other));
    }
    return largest;
  }
  template <uint32_t kLanes, typename T>
  T from_lane(T value, uint32_t distance) const {
    return from_thread<kLanes>(value, thread_ ^ static_cast<int>(distance));
  }
  template <uint32_t kLanes, typename T>
  T from_place(T value, uint32_t place) const {
    return from_thread<kLanes>(
        value, thread_ - thread_ % static_cast<int>(kLanes) + static_cast<int>(place));
  }

  template <size_t kBytes>
  cuda::Words<kBytes> load(const std::byte* src) const {
    cuda::Words<kBytes> words;
    std::memcpy(&words, src, kBytes);
    return words;
  }
  template <size_t kBytes>
  void store(std::byte* dst, const cuda::Words<kBytes>& words) const {
    std::memcpy(dst, &words, kBytes);
  }

  struct Pair {
    uint64_t first;
    uint64_t second;
  };
  // Either word may become visible before the other.
  void store_pair(uint64_t* dst, uint64_t first, uint64_t second) const {
    dawdle();
    const bool is_in_order = random_.below(2) == 0;
    std::atomic_ref(dst[is_in_order ? 0 : 1])
        .store(is_in_order ? first : second, std::memory_order_relaxed);
    dawdle();
    std::atomic_ref(dst[is_in_order ? 1 : 0])
        .store(is_in_order ? second : first, std::memory_order_relaxed);
  }
  Pair load_pair(uint64_t* src) const {
    nap_before(first_packet_);
    return {std::atomic_ref(src[0]).load(std::memory_order_relaxed),
            std::atomic_ref(src[1]).load(std::memory_order_relaxed)};
  }

  double* shared_doubles() const { return shared_.doubles.data(); }

  void pause() const { sched_yield(); }
  uint64_t now_ns() const {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

 private:
  void dawdle() const {
    if (pace_ == Pace::kLate && num_naps_ < kMaxNaps && random_.below(4) == 0) {
      ++num_naps_;
      usleep(kNapUs);
    }
    if (random_.below(4) == 0) sched_yield();
  }
  // Lets the other threads get as far as this thread's work so far allows.
  void nap_before(bool& is_first) const {
    if (pace_ == Pace::kLate && is_first) usleep(kNapUs);
    is_first = false;
  }
  // Stores the value for the neighbours, and waits until they have stored theirs.
  template <uint32_t kLanes>
  void exchange(uint64_t value) const {
    parity_[kLanes] ^= 1;
    shared_.values[kLanes][static_cast<size_t>(thread_)][parity_[kLanes]] = value;
    const auto group = static_cast<uint32_t>(thread_) / kLanes;
    shared_.groups[kLanes][group]->arrive_and_wait();
  }
  template <uint32_t kLanes>
  uint64_t value_of(int thread) const {
    return shared_.values[kLanes][static_cast<size_t>(thread)][parity_[kLanes]];
  }

  template <uint32_t kLanes, typename T>
  T from_thread(T value, int thread) const {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    exchange<kLanes>(bits);
    bits = value_of<kLanes>(thread);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  SharedBlock& shared_;
  int thread_;
  int num_threads_;
  int index_;
  int num_blocks_;
  int local_rank_;
  // Random naps in a launch, and the length of each nap.
  static constexpr int kMaxNaps = 2;
  static constexpr useconds_t kNapUs = 2000;

  mutable Random random_;
  Pace pace_;
  mutable int num_naps_ = 0;
  mutable bool first_barrier_ = true;
  mutable bool first_packet_ = true;
  mutable std::array<size_t, SharedBlock::kMostLanes + 1> parity_{};  // by lanes
};

}  // namespace rota::test
