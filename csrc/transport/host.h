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
#include "transport/unique_fd.h"

namespace rota::transport {

// Equal for processes that can share memory: the kernel's boot id and the network namespace of the
// sockets. ROTA_HOST_ID overrides it.
std::string host_id();

// A peer's process: whether it is alive, and its heap.
class PeerProcess {
 public:
  PeerProcess(pid_t pid, UniqueFd pidfd, UniqueFd status)
      : pid_(pid), pidfd_(std::move(pidfd)), status_(std::move(status)) {}

  pid_t pid() const { return pid_; }

  // Whether the kernel has begun to end the process: it unmaps its memory before its pidfd says
  // that it has ended, which takes milliseconds. False where that cannot be read, and once the
  // process has ended. A system call.
  bool is_exiting() const;

  // Maps the process's heap (transport/heap.h), unless that is done. Throws Error(kTransport) if it
  // is not sealed. Threads may call it at the same time.
  void take_heap(const UniqueFd& memory);
  // Read-only. Empty where it could not be mapped.
  std::span<const std::byte> heap() const;

  // The indices of those that have ended, in one system call.
  static std::vector<size_t> find_ended(const std::vector<const PeerProcess*>& processes);

 private:
  pid_t pid_;
  UniqueFd pidfd_;   // readable once the process has ended; -1 of the own process
  UniqueFd status_;  // /proc/<pid>/stat; -1 where it cannot be opened

  mutable std::mutex mutex_;
  std::optional<Mapping> heap_;
  size_t heap_bytes_ = 0;
};

// The peers' processes: two descriptors each, however many groups they share with this one.
class Host {
 public:
  // The process with this pid to which `pidfd` refers. It lives as long as a group holds it; while
  // one does, later groups get the same one, and their `pidfd` is closed. Threads may call it at
  // the same time.
  std::shared_ptr<PeerProcess> find_process(pid_t pid, UniqueFd pidfd);

 private:
  std::mutex mutex_;
  std::unordered_map<pid_t, std::weak_ptr<PeerProcess>> processes_;
};

}  // namespace rota::transport
