#include "base/core_sharing.h"

#include <sched.h>

#include <algorithm>

namespace rota {

bool CoreSharing::is_needed_by_other() const {
  const int core = sched_getcpu();
  return std::ranges::any_of(others_, [&](const CoreWord* other) {
    const auto place = other->load();
    return place && place->core == core && place->state != CoreWord::State::kYields;
  });
}

void CoreSharing::record(CoreWord::State state) {
  if (own_ != nullptr) own_->record({sched_getcpu(), state});
}

}  // namespace rota
