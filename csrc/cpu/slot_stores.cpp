#include "cpu/slot_stores.h"

#include <algorithm>

namespace rota::cpu {

StorePath SlotStores::measured_path(uint64_t number) const {
  return number % kCompared == 0 ? StorePath::kStreamed : path_;
}

void SlotStores::record(StorePath path, double ns_per_byte, uint64_t number,
                        Clock::time_point now) {
  if (path == StorePath::kStreamed) {
    streamed_.add(ns_per_byte);
    if (path_ == StorePath::kStreamed && now - changed_time_ >= kRetried) {
      path_ = StorePath::kCached;
      changed_at_ = number;
      cached_ = {};
    }
    return;
  }
  if (number - changed_at_ <= kSettling) return;
  cached_.add(ns_per_byte);
  if (cached_.num_measured < kEnough || streamed_.num_measured == 0) return;
  if (cached_.ns_per_byte < std::max(kSlow, kMuchSlower * streamed_.ns_per_byte)) return;
  path_ = StorePath::kStreamed;
  changed_time_ = now;
}

}  // namespace rota::cpu
