// What peers read of a process, in the first page of its heap (transport/heap.h), and who holds its
// LifeWord.
#pragma once

#include <linux/futex.h>

#include <mutex>

#include "base/core_sharing.h"
#include "base/life_word.h"

namespace rota::transport {

// What the kernel reads when the thread ends: in shared memory as a whole, because the memory of a
// process that it ends for want of memory may be gone by then, but for what is shared.
struct Life {
  LifeWord word;
  robust_list entry;
  robust_list_head list;
  // A listener's successor may start before the listener's thread has ended, or even begun. The
  // last to begin must not be the first to end, or nobody would hold the life. For this process's
  // threads alone.
  std::mutex turn;
};

struct ProcessWords {
  Life life;
  CoreWord core;
};

// The calling thread holds the process's life: from construction to destruction, or to the end of
// the process. It must use no robust mutexes of its own. Waits for another thread that holds it.
// Does nothing where the kernel refuses, as in some sandboxes; the end is then noticed later.
class LifeHolder {
 public:
  explicit LifeHolder(Life& life);
  ~LifeHolder();

 private:
  const std::unique_lock<std::mutex> turn_;
  Life& life_;
  uint32_t held_ = 0;  // the word's value
};

}  // namespace rota::transport
