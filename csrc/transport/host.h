// Per-process state shared by all groups: the host's identity and the processes of peers.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/mapping.h"
#include "transport/process_words.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// Equal for processes that can share memory: the kernel's boot id and the network namespace of the
// sockets. ROTA_HOST_ID overrides it.
std::string host_id();

// The NUMA node that a rank is on: it is bound to CPUs of that node alone, of several with CPUs;
// or ROTA_NUMA_NODE names it.
struct NumaNode {
  std::optional<int> number;
  bool is_set_by_hand = false;
};
// The calling thread's. Throws Error(kTransport) if ROTA_NUMA_NODE is no number.
NumaNode numa_node();
// The node in `directory`, which has a nodeN/cpulist for each, that holds all these CPUs; none if
// no node does, or if fewer than two have CPUs.
std::optional<int> numa_node_of(const std::vector<int>& cpus, const std::string& directory);

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

// The processes of peers. Each takes one descriptor, however many groups it shares with this one.
class Host {
 public:
  // Returns the process with this pid, to which `pidfd` refers. It lives as long as a group holds
  // it; meanwhile, later calls return the same object and close their `pidfd`. Thread-safe.
  std::shared_ptr<PeerProcess> find_process(pid_t pid, UniqueFd pidfd);

 private:
  std::mutex mutex_;
  std::unordered_map<pid_t, std::weak_ptr<PeerProcess>> processes_;
};

}  // namespace rota::transport
