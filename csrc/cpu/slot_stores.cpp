#include "cpu/slot_stores.h"

#include <algorithm>

namespace rota::cpu {

SlotStores::Plan SlotStores::next(size_t num_bytes) {
  const uint64_t number = num_stores_++;
  const bool is_due = number % kMeasured == 0;
  if (path_ == StorePath::kStreamed) return {path_, is_due};
  num_bytes_ += num_bytes;
  if (!has_settled()) return {path_, false};
  if (cached_.num_measured < kEnough) return {path_, true};
  // Where stores into the caches are fast, there is nothing to compare.
  if (cached_.ns_per_byte < kSlow) return {path_, is_due};
  const bool is_compared = number % kCompared == 0 || streamed_.num_measured == 0;
  return {is_compared ? StorePath::kStreamed : path_, is_due || is_compared};
}

void SlotStores::record(StorePath path, double ns_per_byte, Clock::time_point now) {
  if (path_ == StorePath::kStreamed) {
    if (now - changed_time_ < kRetried) return;
    path_ = StorePath::kCached;
    num_bytes_ = 0;
    cached_ = streamed_ = {};
    return;
  }
  (path == StorePath::kStreamed ? streamed_ : cached_).add(ns_per_byte);
  if (streamed_.num_measured == 0) return;
  if (cached_.ns_per_byte < std::max(kSlow, kMuchSlower * streamed_.ns_per_byte)) return;
  path_ = StorePath::kStreamed;
  changed_time_ = now;
}

}  // namespace rota::cpu
