// Memory that the ranks of a host share: anonymous (memfd), sealed, and reserved before it is used.
//
// What that buys over shm_open: nothing has a name in /dev/shm, so nothing leaks when a process is
// killed and nobody else can attach; a peer can neither resize nor write a region that is not its
// own; and a full /dev/shm is an error instead of a SIGBUS in the middle of a step.
#pragma once

#include <cstddef>

#include "transport/layout.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// A mapping that unmaps itself.
class Mapping {
 public:
  enum class Access {
    kOwner,
    kPeer,  // the control block, where the flags are, is read-only: a flag has one writer
  };

  Mapping(const UniqueFd& memory, size_t num_bytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();
  std::byte* base() const { return base_; }

 private:
  std::byte* base_;
  size_t num_bytes_;
};

// The region of this rank, of which only the control block is reserved.
struct OwnMemory {
  UniqueFd memory;
  Mapping region;
  bool is_reserved;  // the whole region is; it must be, where the kernel cannot do parts

  // Throws Error(kTransport) where memory is short.
  static OwnMemory make(const Geometry& geometry, int world_size);
};

// Throws Error(kTransport) where fewer bytes are free. Beyond a cgroup's limit the kernel does not
// refuse pages, it wakes the OOM killer; hence a look before each reservation.
void check_available(size_t num_bytes);

// Takes pages of an own region now: a shortage is an Error(kTransport) here and never a SIGBUS at
// first touch.
void reserve_pages(std::byte* base, const Span& span);

// Maps what a peer has handed over. Throws Error(kTransport) unless it has this size and keeps it.
Mapping map_peer(const UniqueFd& memory, size_t num_bytes, int peer);

}  // namespace rota::transport
