#include "transport/life.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace rota::transport {

LifeHolder::LifeHolder(Life& life) : turn_(life.turn), life_(life) {
  life.entry.next = &life.list.list;
  life.list.list.next = &life.entry;
  life.list.futex_offset =
      reinterpret_cast<intptr_t>(&life.word) - reinterpret_cast<intptr_t>(&life.entry);
  life.list.list_op_pending = nullptr;
  if (syscall(SYS_set_robust_list, &life.list, sizeof(life.list)) != 0) return;
  // The kernel wakes nobody without FUTEX_WAITERS, and peers may not write the word to say that
  // they sleep.
  held_ = static_cast<uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS;
  std::atomic_ref(life.word.value).store(held_);
}

// The kernel looks at a word only if it names the thread that ends.
LifeHolder::~LifeHolder() {
  if (held_ != 0) std::atomic_ref(life_.word.value).store(0);
}

}  // namespace rota::transport
