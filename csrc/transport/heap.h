// Memory that peers' processes can read; it holds the tensors of rota.empty(). A process has one
// heap for all its groups. Peers map all of it, read-only, when they connect; pages are reserved
// when they are allocated. (Like OpenSHMEM's symmetric heap, but ranks' offsets need not be equal.)
// Its first page tells peers of the process.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "transport/life.h"
#include "transport/mapping.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// Thread-safe. Use the process's instance, per_process<Heap>().
class Heap {
 public:
  // As large as the machine's memory, up to 256 GiB, or half of what `ulimit -v` leaves; no page is
  // allocated yet. Throws Error(kTransport).
  Heap();

  // The descriptor that peers get.
  const UniqueFd& memory() const { return memory_; }
  // At its start.
  ProcessWords& words() { return *reinterpret_cast<ProcessWords*>(first_page_.base()); }

  // Returns whole pages of zeroes. Throws Error(kTransport) if memory is short.
  void* allocate(size_t num_bytes);
  // Returns the pages to the system, once no hold is left. Does nothing in a forked child, whose
  // parent still has them.
  void release(void* data);
  // Until drop(), the block that holds `data` stays as it is: other processes map it.
  void hold(const void* data);
  void drop(const void* data);

  // The offset of `data` in the heap; none for memory outside it.
  std::optional<size_t> offset_of(const void* data) const;
  // Empty before the first allocation.
  std::span<const std::byte> contents() const;

 private:
  struct Block {
    size_t num_bytes;
    int num_holds = 0;
    bool is_released = false;
  };
  using Blocks = std::map<size_t, Block>;  // by offset

  // The block that holds `data`.
  Blocks::iterator find(const void* data);
  // Frees a released block once nobody holds it.
  void free_unless_held(Blocks::iterator block);

  void map_all(size_t num_bytes);  // for errors: what the caller needs
  // The offset of the first gap that is long enough.
  size_t find_room(size_t num_bytes) const;
  void reserve(const Span& span);

  const size_t num_bytes_;
  const UniqueFd memory_;
  const Mapping first_page_;
  const uint64_t fork_generation_;

  mutable std::mutex mutex_;
  std::optional<Mapping> mapping_;  // from the first allocation on
  Blocks in_use_;
};

}  // namespace rota::transport
