#include "base/core_sharing.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "base/cores.h"
#include "base/error.h"

namespace rota {

std::optional<int> emptier_core(const RankOnCore& rank, std::span<const RankOnCore> others) {
  const auto weight_with_rank = [&](int core) {
    uint64_t weight = rank.weight();
    for (const RankOnCore& other : others) weight += other.core == core ? other.weight() : 0;
    return weight;
  };
  std::optional<int> best;
  uint64_t least = weight_with_rank(rank.core);
  for (const RankOnCore& other : others) {
    const uint64_t weight = weight_with_rank(other.core);
    if (weight >= least) continue;
    least = weight;
    best = other.core;
  }
  return best;
}

size_t num_running() {
  auto file = in_classic_locale<std::ifstream>("/proc/loadavg");
  std::string load;
  size_t running = 0;
  const bool is_said = static_cast<bool>(file >> load >> load >> load >> running);
  return is_said ? running : std::numeric_limits<size_t>::max();
}

bool CoreSharing::is_needed_by_other() const {
  const int core = sched_getcpu();
  return std::ranges::any_of(others_, [&](const CoreWord* other) {
    const auto place = other->load();
    return place && place->core == core && place->state != CoreWord::State::kYields;
  });
}

void CoreSharing::spread(std::chrono::steady_clock::time_point now) {
  const auto next_look = next_look_.load(std::memory_order_relaxed);
  if (others_.empty() || now.time_since_epoch().count() < next_look) return;
  std::vector<RankOnCore> others;
  for (const CoreWord* other : others_) {
    const auto place = other->load();
    if (!place) return;
    others.push_back({place->core, other->load_extra_weight()});
  }
  const RankOnCore own{sched_getcpu(), own_->load_extra_weight()};
  const std::optional<int> target = emptier_core(own, others);
  if (!target) return;
  next_look_.store((now + kMovesEvery).time_since_epoch().count(), std::memory_order_relaxed);
  if (count_running_() > others_.size() + 1) return;
  if (move_to_core(*target)) record(CoreWord::State::kYields);
}

void CoreSharing::record(CoreWord::State state) {
  if (own_ != nullptr) own_->record({sched_getcpu(), state});
}

void CoreSharing::record_extra_bytes(uint64_t num_bytes) {
  if (own_ != nullptr) own_->record_extra_weight(num_bytes / kBytesPerWeight);
}

}  // namespace rota
