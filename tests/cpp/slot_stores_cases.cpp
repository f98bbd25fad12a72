// When a writer goes past its caches, from times that are made up.
#include "cpu/slot_stores.h"

#include <chrono>
#include <cstdint>
#include <vector>

#include "check.h"

namespace rota::test {
namespace {

using cpu::SlotStores;
using cpu::StorePath;
using std::chrono::milliseconds;

// Nanoseconds for each byte.
struct Times {
  double cached;
  double streamed;
};
constexpr Times kFar{0.4, 0.05};
constexpr Times kNear{0.1, 0.03};
constexpr Times kSlowMemory{1.0, 0.5};

class Writer {
 public:
  // num_stores of them, 1 us apart.
  void store(const Times& times, uint64_t num_stores = 4 * kSettling) {
    for (uint64_t i = 0; i < num_stores; ++i) {
      now_ += std::chrono::microseconds(1);
      const auto [path, is_measured] = stores_.next(kBytes);
      num_cached_ += path == StorePath::kCached ? 1 : 0;
      if (!is_measured) continue;
      const double time = path == StorePath::kCached ? times.cached : times.streamed;
      stores_.record(path, time, now_);
    }
  }
  void wait(milliseconds time) { now_ += time; }

  bool streams() const { return stores_.path() == StorePath::kStreamed; }
  uint64_t num_cached() const { return num_cached_; }

  static constexpr size_t kBytes = 64 << 10;
  static constexpr uint64_t kSettling = SlotStores::kSettlingBytes / kBytes;

 private:
  SlotStores stores_;
  SlotStores::Clock::time_point now_{};
  uint64_t num_cached_ = 0;
};

void ranks_that_are_far_apart_store_past_the_caches() {
  Writer writer;
  writer.store(kFar, Writer::kSettling);
  check(!writer.streams(), "first stores are not judged");
  writer.store(kFar, SlotStores::kEnough + 1);
  check(writer.streams(), "far apart");
  check_equal(writer.num_cached(), Writer::kSettling + SlotStores::kEnough, "slow stores");
}

void neighbours_store_into_the_caches() {
  Writer writer;
  writer.store(kNear, 10000);
  check_equal(writer.num_cached(), 10000, "stores into the caches");
  check(!writer.streams(), "near");
  writer.store({100, 0.03}, SlotStores::kMeasured);
  writer.store(kNear, 10000);
  check(!writer.streams(), "one store of a rank that had lost its core");
}

void memory_that_is_slow_for_both_changes_nothing() {
  Writer writer;
  writer.store(kSlowMemory, 10000);
  check(!writer.streams(), "slow memory");
}

void ranks_that_have_moved_are_noticed() {
  Writer writer;
  writer.store(kFar);
  const uint64_t num_cached = writer.num_cached();
  writer.store(kNear, 10000);
  check(writer.streams() && writer.num_cached() == num_cached, "it is not tried again at once");
  writer.wait(SlotStores::kRetried);
  writer.store(kNear, 10000);
  check(!writer.streams(), "near now");
  writer.store(kFar, 8 * Writer::kSettling);
  check(writer.streams(), "far again");
  writer.wait(SlotStores::kRetried);
  writer.store(kFar, Writer::kSettling);
  check(!writer.streams(), "tried again");
  writer.store(kFar);
  check(writer.streams(), "still far");
}

// Past the first stores, which are not judged.
void settle(SlotStores& stores) {
  std::vector<unsigned char> from(SlotStores::kSettlingBytes), to(from.size());
  stores.store(to.data(), from.data(), from.size());
}

void both_ways_copy() {
  SlotStores cached, streamed;
  settle(cached);
  settle(streamed);
  const auto now = SlotStores::Clock::now();
  for (int i = 0; i < SlotStores::kEnough; ++i) {
    streamed.record(StorePath::kCached, kFar.cached, now);
  }
  streamed.record(StorePath::kStreamed, kFar.streamed, now);
  check(streamed.path() == StorePath::kStreamed, "it goes past the caches");
  const std::vector<size_t> sizes{
      0, 1, 100, SlotStores::kShortest - 1, SlotStores::kShortest, SlotStores::kShortest + 13};
  for (uint64_t round = 0; round < 2 * SlotStores::kCompared; ++round) {
    for (const size_t num_bytes : sizes) {
      for (SlotStores* stores : {&cached, &streamed}) {
        std::vector<unsigned char> from(num_bytes + 1), to(num_bytes + 1, 7);
        for (size_t i = 0; i < from.size(); ++i) {
          from[i] = static_cast<unsigned char>(i * 31 + round);
        }
        stores->store(to.data(), from.data(), num_bytes);
        check(to.back() == 7, "nothing behind the end");
        from.back() = 7;
        check(from == to, "what was copied");
      }
    }
  }
}

const CaseTable kCases{
    {"slot_stores_far", ranks_that_are_far_apart_store_past_the_caches},
    {"slot_stores_near", neighbours_store_into_the_caches},
    {"slot_stores_slow_memory", memory_that_is_slow_for_both_changes_nothing},
    {"slot_stores_moved", ranks_that_have_moved_are_noticed},
    {"slot_stores_copies", both_ways_copy},
};

}  // namespace
}  // namespace rota::test
