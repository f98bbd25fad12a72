// What ranks that outnumber the cores tell each other: who works on which core, yields or sleeps.
//
// Yielding in a loop goes wrong among them, twice. Linux hands a core on only within a scheduling
// group, and where it makes one of every session (autogroup, sched(7)), each of torchrun's ranks is
// in another: a rank that yields keeps the core, for a time slice, from the rank that works. And
// ranks that yield count as busy, so Linux leaves three on one core beside one on another. So a
// rank that waits sleeps while another of its core works in spite of its yields, or sleeps, since
// that one may have been woken and nobody sees it; and it moves to a core that has fewer, or whose
// ranks have less to do: the root of a long scatter needs a core of its own.
//
// All of this is advice: a wrong word costs time, never a message.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/flag.h"

namespace rota {

// Of one process, in shared memory. Only its owner writes it. Relaxed: nobody reads anything else
// by it.
struct alignas(kCacheLineBytes) CoreWord {
  uint64_t value;         // 0: not known
  uint64_t extra_weight;  // see RankOnCore; of its last collective that copies

  enum class State : uint8_t { kWorks, kYields, kSleeps };
  static constexpr uint64_t kNumStates = 3;
  struct Place {
    int core;
    State state;

    bool operator==(const Place&) const = default;
  };

  std::optional<Place> load() const {
    const uint64_t word = load_word(value);
    if (word == 0) return std::nullopt;
    return Place{static_cast<int>(word / kNumStates) - 1, static_cast<State>(word % kNumStates)};
  }
  void record(const Place& place) {
    store_word(value, (static_cast<uint64_t>(place.core) + 1) * kNumStates +
                          static_cast<uint64_t>(place.state));
  }
  uint64_t load_extra_weight() const { return load_word(extra_weight); }
  void record_extra_weight(uint64_t weight) { store_word(extra_weight, weight); }

 private:
  static uint64_t load_word(const uint64_t& word) {
    return SharedWord<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_relaxed);
  }
  // Stores only what is new, so that the readers keep their copies of the line.
  static void store_word(uint64_t& word, uint64_t value) {
    const SharedWord<uint64_t> shared(word);
    if (shared.load(std::memory_order_relaxed) != value) {
      shared.store(value, std::memory_order_relaxed);
    }
  }
};

// A rank weighs 1 on its core, and 1 more for each kBytesPerWeight that it copies in a collective
// beyond what every rank copies.
struct RankOnCore {
  int core;
  uint64_t extra_weight = 0;

  uint64_t weight() const { return 1 + extra_weight; }
};

// The core to which a rank should move from its own: of those with another rank the one with the
// least weight, if it has less than this one even with this rank. Linux itself fills a core on
// which nothing runs.
std::optional<int> emptier_core(const RankOnCore& rank, std::span<const RankOnCore> others);

// The threads of the machine that run or could; a great many if /proc does not say.
size_t num_running();

// Of one rank. Thread-safe.
class CoreSharing {
 public:
  // own: null where ranks do not tell each other, and then there are no others.
  CoreSharing(CoreWord* own, std::vector<const CoreWord*> others,
              std::function<size_t()> count_running = num_running)
      : own_(own), others_(std::move(others)), count_running_(std::move(count_running)) {}

  // What this rank does, on the core where it is.
  void record(CoreWord::State state);
  // How many bytes more than every other rank it copies in the collective that it is in.
  void record_extra_bytes(uint64_t num_bytes);
  // With 4 ranks on 2 cores a scatter or gather of 4 MiB and more is faster with the root alone,
  // one of less than 1 MiB slower (benchmarks/LOG.md).
  static constexpr uint64_t kBytesPerWeight = 1 << 20;

  // Whether another rank works on this core, or sleeps and may have been woken since.
  bool is_needed_by_other() const;

  // Moves this thread to an emptier core, if all ranks' are known and nothing but ranks runs: what
  // other programs need, Linux knows better. Looks what runs at most once per kMovesEvery.
  void spread(std::chrono::steady_clock::time_point now);
  static constexpr std::chrono::milliseconds kMovesEvery{4};

 private:
  CoreWord* own_;
  std::vector<const CoreWord*> others_;
  std::function<size_t()> count_running_;
  std::atomic<std::chrono::steady_clock::rep> next_look_{0};
};

}  // namespace rota
