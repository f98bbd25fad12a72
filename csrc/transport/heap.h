// Memory that the processes of peers can read: the tensors of rota.empty() lie in it. A process has
// one, for all its groups. Peers map it whole when they connect, read-only; pages are reserved as
// they are allocated. (OpenSHMEM's symmetric heap, but nothing has to lie at equal offsets.)
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "transport/mapping.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// Thread-safe. Use this process's: per_process<Heap>().
class Heap {
 public:
  // As large as the machine's memory, up to 256 GiB; no page is there yet. Throws
  // Error(kTransport).
  Heap();

  // For peers.
  const UniqueFd& memory() const { return memory_; }

  // Whole pages of zeroes. Throws Error(kTransport) if memory is short.
  void* allocate(size_t num_bytes);
  // Returns the pages to the system. Does nothing in a forked child, whose parent still has them.
  void release(void* data);

  // Of what has been allocated; none for other memory.
  std::optional<size_t> offset_of(const void* data) const;
  // Empty before the first allocation.
  std::span<const std::byte> contents() const;

 private:
  // Of the first gap that is long enough.
  size_t find_room(size_t num_bytes) const;
  void reserve(const Span& span);

  const size_t num_bytes_;
  const UniqueFd memory_;
  const uint64_t fork_generation_;

  mutable std::mutex mutex_;
  std::optional<Mapping> mapping_;   // from the first allocation on
  std::map<size_t, size_t> in_use_;  // offset, bytes
};

}  // namespace rota::transport
