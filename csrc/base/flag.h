// The one word that ranks synchronise on: a monotonic counter in shared memory.
//
// Invariants: one writer at a time; its own cache line; 0 at rest; the value only grows, except in
// sleep flags (ControlBlock), which return to 0. A reader that sees value v also sees everything
// the writer did before publishing v, including the payload. The payload shares the flag's cache
// line, so that reading it costs no second cache miss.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rota {

inline constexpr size_t kCacheLineBytes = 64;

// Every access to a shared word goes through this alias; kernels use cuda/system_word.h.
template <typename T>
using SharedWord = std::atomic_ref<T>;

struct alignas(kCacheLineBytes) Flag {
  uint64_t value;
  std::array<uint64_t, 7> payload;  // written before publish(), read after load()

  // Acquire: pairs with publish(). atomic_ref<const T> only comes with C++26, hence the cast; a
  // load never writes, so this is safe on a read-only mapping.
  uint64_t load() const {
    return SharedWord<uint64_t>(const_cast<uint64_t&>(value)).load(std::memory_order_acquire);
  }

  // Sequentially consistent, which includes release: after the store the writer checks whether a
  // reader sleeps, and a reader publishes that it sleeps before it checks the flag again. With a
  // weaker order each could miss the other (Dekker's pattern; see waiter.h).
  void publish(uint64_t new_value) {
    SharedWord<uint64_t>(value).store(new_value, std::memory_order_seq_cst);
  }

  // Only release: for a flag on which nobody sleeps.
  void record(uint64_t new_value) {
    SharedWord<uint64_t>(value).store(new_value, std::memory_order_release);
  }

  // Changes `from`, which this thread has loaded, to `to` unless another writer was first; for
  // flags whose writers take turns. Relaxed: the load has acquired what the writer of `from` did,
  // and nobody acts on `to` but by waiting for the next value.
  bool try_change(uint64_t from, uint64_t to) {
    return SharedWord<uint64_t>(value).compare_exchange_strong(from, to, std::memory_order_relaxed);
  }

  // As load(), but sequentially consistent: for a reader that checks the flag again after
  // announcing that it sleeps, and for a writer that checks for sleepers.
  uint64_t load_ordered() const {
    return SharedWord<uint64_t>(const_cast<uint64_t&>(value)).load(std::memory_order_seq_cst);
  }
};
static_assert(sizeof(Flag) == kCacheLineBytes);

}  // namespace rota
