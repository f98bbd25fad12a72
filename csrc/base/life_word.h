// How a process's peers notice its end at once. One of its threads holds a word in shared memory as
// a robust futex (set_robust_list(2)): when the kernel begins to end the thread, it marks the word
// and wakes one sleeper. It does so before it unmaps the process's memory, which takes milliseconds
// and after which alone the pidfd tells of the end.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>

namespace rota {

struct LifeWord {
  uint32_t value;  // the id of the thread that holds it, and FUTEX_WAITERS; 0: nobody does

  // Acquire, as every load of a shared word. Safe on a read-only mapping, see Flag::load().
  uint32_t load() const {
    return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(value)).load(std::memory_order_acquire);
  }
  static bool is_held(uint32_t value) { return (value & FUTEX_TID_MASK) != 0; }
  // The kernel has begun to end the process.
  bool is_ending() const { return (load() & FUTEX_OWNER_DIED) != 0; }
};

}  // namespace rota
