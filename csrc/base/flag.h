// The one word that ranks synchronise on: a monotonic counter in shared memory.
//
// Invariants: one writer; its own cache line; 0 at rest; the value only grows, except for that of
// ControlBlock::sleeping, which goes back to 0. A reader that sees value v sees everything its
// writer did before it published v, the payload included, which shares the line so that a few words
// cost no second cache miss.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rota {

inline constexpr size_t kCacheLineBytes = 64;

// The only way shared words are accessed; kernels use cuda/system_word.h.
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

  // Release, and more: sequentially consistent, because the writer goes on to look whether a reader
  // sleeps, and the reader says that it sleeps before it looks at the flag once more. With less,
  // both could miss the other (Dekker's pattern; see waiter.h).
  void publish(uint64_t new_value) {
    SharedWord<uint64_t>(value).store(new_value, std::memory_order_seq_cst);
  }

  // As load(), for the second look of a reader that has just said it sleeps.
  uint64_t load_ordered() const {
    return SharedWord<uint64_t>(const_cast<uint64_t&>(value)).load(std::memory_order_seq_cst);
  }
};
static_assert(sizeof(Flag) == kCacheLineBytes);

}  // namespace rota
