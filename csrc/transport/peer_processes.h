// The processes of this process's peers: whether each is alive, and its heap. All groups share
// them.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/life.h"
#include "transport/mapping.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// A peer's process: whether it is alive, and its heap.
class PeerProcess {
 public:
  PeerProcess(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid() const { return pid_; }

  // Maps the process's heap (transport/heap.h), unless it is already mapped. Throws
  // Error(kTransport) if it is not sealed. Thread-safe.
  void take_heap(const UniqueFd& memory);
  // Read-only. Empty if it could not be mapped.
  std::span<const std::byte> heap() const;

  // The start of take_heap(), for those that map parts of the heap themselves. Thread-safe.
  void take_words(const UniqueFd& heap);
  // Null if they could not be mapped. After take_heap() or take_words().
  const LifeWord* life() const { return words_ ? &words().life.word : nullptr; }
  const CoreWord* core() const { return words_ ? &words().core : nullptr; }
  // Whether the kernel has not begun to end the process. Costs a system call if the process does
  // not hold its life. After take_heap() or take_words().
  bool is_running() const;

  // The indices of the processes that have ended. Costs one system call.
  static std::vector<size_t> find_ended(const std::vector<const PeerProcess*>& processes);

 private:
  const ProcessWords& words() const {
    return *reinterpret_cast<const ProcessWords*>(words_->base());
  }

  pid_t pid_;
  UniqueFd pidfd_;  // readable once the process has ended; -1 for the own process

  mutable std::mutex mutex_;
  std::optional<Mapping> words_;  // constant once it is there
  std::optional<Mapping> heap_;
  size_t heap_bytes_ = 0;
};

// The peers' processes by pid. Each takes one descriptor, however many groups it shares with this
// one.
class PeerProcesses {
 public:
  // Returns the process with this pid, to which `pidfd` refers. It lives as long as a group holds
  // it; meanwhile, later calls return the same object and close their `pidfd`. Thread-safe.
  std::shared_ptr<PeerProcess> find(pid_t pid, UniqueFd pidfd);

 private:
  std::mutex mutex_;
  std::unordered_map<pid_t, std::weak_ptr<PeerProcess>> processes_;
};

}  // namespace rota::transport
