// What there is one of in each process, also in a forked one.
#pragma once

#include <atomic>

#include "base/fork_generation.h"

namespace rota {

// This process's T, made at its first use. A forked child makes one of its own: its parent's may
// have been locked by a thread that does not exist in the child, which would wait for it for ever.
// None is destroyed, because the order of static destructors is unknown; the chain shows leak
// checkers that nothing is lost.
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
    // Of two threads that get here at once, the second takes what the first has made.
    if (latest.compare_exchange_strong(instance, made, std::memory_order_acq_rel)) {
      instance = made;
    } else {
      delete made;
    }
  }
  return instance->value;
}

}  // namespace rota
