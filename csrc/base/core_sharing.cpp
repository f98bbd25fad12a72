#include "base/core_sharing.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "base/cores.h"

namespace rota {

std::optional<int> emptier_core(int core, std::span<const int> others) {
  const auto num_others_on = [&](int each) { return std::ranges::count(others, each); };
  const auto num_here = num_others_on(core) + 1;
  std::optional<int> best;
  auto fewest = num_here - 1;
  for (const int each : others) {
    const auto num_there = num_others_on(each);
    if (num_there >= fewest) continue;
    fewest = num_there;
    best = each;
  }
  return best;
}

size_t num_running() {
  std::ifstream file("/proc/loadavg");
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
  std::vector<int> cores;
  for (const CoreWord* other : others_) {
    const auto place = other->load();
    if (!place) return;
    cores.push_back(place->core);
  }
  const std::optional<int> target = emptier_core(sched_getcpu(), cores);
  if (!target) return;
  next_look_.store((now + kMovesEvery).time_since_epoch().count(), std::memory_order_relaxed);
  if (count_running_() > others_.size() + 1) return;
  if (move_to_core(*target)) record(CoreWord::State::kYields);
}

void CoreSharing::record(CoreWord::State state) {
  if (own_ != nullptr) own_->record({sched_getcpu(), state});
}

}  // namespace rota
