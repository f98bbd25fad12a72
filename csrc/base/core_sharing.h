// What ranks that outnumber the cores tell each other: who works on which core, yields or sleeps.
//
// Yielding in a loop goes wrong among them: Linux hands a core on only within a scheduling group,
// and where it makes one of every session (autogroup, sched(7)), each of torchrun's ranks is in
// another. A rank that yields then keeps the core, for a time slice, from the rank that works. So a
// rank that waits sleeps while another of its core works in spite of its yields, or sleeps, since
// that one may have been woken and nobody sees it. Which core a thread runs on is left to Linux.
//
// All of this is advice: a wrong word costs time, never a message.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/flag.h"

namespace rota {

// One process's word, in shared memory. Only its owner writes it. Relaxed: nobody reads anything
// else by it.
struct alignas(kCacheLineBytes) CoreWord {
  uint64_t value;  // 0: not known

  enum class State : uint8_t { kWorks, kYields, kSleeps };
  static constexpr uint64_t kNumStates = 3;
  struct Place {
    int core;
    State state;

    bool operator==(const Place&) const = default;
  };

  std::optional<Place> load() const {
    const uint64_t word = shared().load(std::memory_order_relaxed);
    if (word == 0) return std::nullopt;
    return Place{static_cast<int>(word / kNumStates) - 1, static_cast<State>(word % kNumStates)};
  }
  // Stores only what is new, so that the readers keep their copies of the line.
  void record(const Place& place) {
    const uint64_t word =
        (static_cast<uint64_t>(place.core) + 1) * kNumStates + static_cast<uint64_t>(place.state);
    if (shared().load(std::memory_order_relaxed) != word) {
      shared().store(word, std::memory_order_relaxed);
    }
  }

 private:
  SharedWord<uint64_t> shared() const { return SharedWord<uint64_t>(const_cast<uint64_t&>(value)); }
};

// One rank's view. Thread-safe.
class CoreSharing {
 public:
  // own: null where ranks do not tell each other, and then there are no others.
  CoreSharing(CoreWord* own, std::vector<const CoreWord*> others)
      : own_(own), others_(std::move(others)) {}

  // What this rank does, on the core where it is.
  void record(CoreWord::State state) {
    if (own_ != nullptr) own_->record({sched_getcpu(), state});
  }

  // Whether another rank works on this core, or sleeps and may have been woken since.
  bool is_needed_by_other() const {
    const int core = sched_getcpu();
    return std::ranges::any_of(others_, [&](const CoreWord* other) {
      const auto place = other->load();
      return place && place->core == core && place->state != CoreWord::State::kYields;
    });
  }

 private:
  CoreWord* own_;
  std::vector<const CoreWord*> others_;
};

}  // namespace rota
