// One instance per process, also in a forked child.
#pragma once

#include <atomic>

#include "base/fork_generation.h"

namespace rota {

// This process's T, created at first use. A forked child creates its own: the parent's may be
// locked by a thread that does not exist in the child, so the child would wait forever. Instances
// are never destroyed, because the order of static destructors is unknown; they are chained so that
// leak checkers find them reachable.
template <typename T>
T& per_process() {
  struct Instance {
    uint64_t generation;
    Instance* of_parent;
    T value{};
  };
  static std::atomic<Instance*> latest{nullptr};
  Instance* instance = latest.load(std::memory_order_acquire);
  if (instance == nullptr || instance->generation != fork_generation()) {
    auto* made = new Instance{fork_generation(), instance};
    // If two threads get here at once, the second uses the first one's instance.
    if (latest.compare_exchange_strong(instance, made, std::memory_order_acq_rel)) {
      instance = made;
    } else {
      delete made;
    }
  }
  return instance->value;
}

}  // namespace rota
