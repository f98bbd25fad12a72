// Stores into shared memory that others read, again and again in the same places.
//
// Where the writer and its readers share no third-level cache, a store into a line of which both
// have a copy can take 27 ns, since the other copy must be given up first: on an AMD Zen 4, 8 MiB
// pass through slots in 2 to 4 ms instead of 0.7. A store past the caches takes as long everywhere,
// but then readers get the line from memory (benchmarks/LOG.md has both). Where ranks run is not
// known and changes, in a virtual machine within seconds. So the writer measures both ways, and
// goes past the caches while the other one is much slower. No result depends on it.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/limits.h"
#include "cpu/copy.h"

namespace rota::cpu {

// Stores what one rank writes for the same readers. Not for several threads at once.
class SlotStores {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Kind : uint8_t { kMeasured, kIntoCaches };

  explicit SlotStores(Kind kind = Kind::kMeasured) : kind_(kind) {}

  // Copies. When it is done, the data is there for whoever is told so by a flag.
  void store(void* dst, const void* src, size_t num_bytes) {
    if (num_bytes < kShortest || kind_ == Kind::kIntoCaches) return copy_bytes(dst, src, num_bytes);
    const Plan plan = next(num_bytes);
    if (!plan.is_measured) return store_bytes(plan.path, dst, src, num_bytes);
    const Clock::time_point start = Clock::now();
    store_bytes(plan.path, dst, src, num_bytes);
    const Clock::time_point end = Clock::now();
    const std::chrono::duration<double, std::nano> time = end - start;
    record(plan.path, time.count() / static_cast<double>(num_bytes), end);
  }

  StorePath path() const { return path_; }
  // How the next store is done.
  struct Plan {
    StorePath path;
    bool is_measured;
  };
  Plan next(size_t num_bytes);
  // What a measured store took.
  void record(StorePath path, double ns_per_byte, Clock::time_point now);

  static constexpr size_t kShortest = 8 << 10;  // below, everything is stored into the caches
  static constexpr uint64_t kMeasured = 16;     // one of these is measured
  // While stores into the caches are slow, one of these goes past them, for comparison.
  static constexpr uint64_t kCompared = 64;
  // A first store into the caches after others past them is fast. This many bytes fill all places
  // of a ring of slots, or of a link (transport/layout.h).
  static constexpr uint64_t kSettlingBytes = 2 << 20;
  static constexpr int kEnough = 4;  // measurements of stores into the caches, the first ones
  // Into the caches is too slow if a store takes this long for each byte, and this many times as
  // long as one past them. With a common third-level cache it is 0.08 to 0.12 ns and 2 to 4 times,
  // since the time of a store past the caches is not all its cost; without one, 0.35 to 0.5 and 6
  // to 9 times.
  static constexpr double kSlow = 0.16;
  static constexpr double kMuchSlower = 3;
  // How long to go past the caches before the other way is tried again, in which the stores after
  // the settling ones are slow if nothing has changed.
  static constexpr std::chrono::milliseconds kRetried{500};

 private:
  // What a store takes on the whole.
  struct Time {
    int num_measured = 0;
    double ns_per_byte = 0;

    // A much longer time may be that of a rank that lost its core, so it counts in part.
    void add(double measured) {
      constexpr double kLongest = 2, kShare = 1.0 / 8;
      if (num_measured++ == 0) {
        ns_per_byte = measured;
      } else if (num_measured <= kEnough) {
        ns_per_byte = std::min(ns_per_byte, measured);
      } else {
        ns_per_byte += kShare * (std::min(measured, kLongest * ns_per_byte) - ns_per_byte);
      }
    }
  };

  bool has_settled() const { return num_bytes_ > kSettlingBytes; }

  Kind kind_;
  StorePath path_ = StorePath::kCached;
  uint64_t num_stores_ = 0;
  uint64_t num_bytes_ = 0;            // since the change to kCached
  Clock::time_point changed_time_{};  // of the change to kStreamed
  Time cached_;                       // since num_bytes_ has settled
  Time streamed_;                     // likewise
};

// A rank's stores for what a single other rank reads, for what all others read, and for places that
// change hands (cpu/exchange.h).
class SlotWriter {
 public:
  SlotStores& to(int reader) { return of_reader_[static_cast<size_t>(reader)]; }
  SlotStores& to_all() { return of_all_; }
  SlotStores& into_caches() { return into_caches_; }

 private:
  std::array<SlotStores, kMaxWorldSize> of_reader_;
  SlotStores of_all_;
  SlotStores into_caches_{SlotStores::Kind::kIntoCaches};
};

}  // namespace rota::cpu
