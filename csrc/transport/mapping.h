// Shared memory of the ranks of one host: anonymous (memfd), sealed, and reserved before use.
//
// Compared with shm_open: nothing has a name in /dev/shm, so nothing leaks when a process is
// killed and nobody else can attach; a peer can neither resize nor write a region that is not its
// own; and a full /dev/shm is an error instead of a SIGBUS in the middle of a step.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "transport/layout.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// A mapping that unmaps itself.
class Mapping {
 public:
  enum class Access {
    kOwner,
    kPeer,  // the control block, where the flags are, is read-only: a flag has one writer
    kReader,
    kWriter,  // of all of it, as its owner is
  };

  // offset: of whole pages.
  Mapping(const UniqueFd& memory, size_t num_bytes, Access access, size_t offset = 0);
  std::byte* base() const { return base_.get(); }

 private:
  struct Unmap {
    size_t num_bytes;
    void operator()(std::byte* base) const;
  };
  std::unique_ptr<std::byte, Unmap> base_;
};

// Anonymous memory, not sealed yet; the name appears in /proc. Throws Error(kTransport).
UniqueFd create_memory(const char* name, size_t num_bytes);
// After this, nobody can change its size.
void seal(const UniqueFd& memory);
// The size; none if the memory is not sealed.
std::optional<size_t> sealed_bytes(const UniqueFd& memory);

// This rank's region. Only the control block is reserved.
struct OwnMemory {
  UniqueFd memory;
  Mapping region;
  bool is_reserved;  // true where the kernel can only reserve all of it (before Linux 5.14)

  // Throws Error(kTransport) if memory is short.
  static OwnMemory make(const Geometry& geometry, int world_size);
};

// Throws Error(kTransport) if fewer bytes are free. Call it before each reservation: beyond a
// cgroup's limit the kernel does not refuse pages but wakes the OOM killer.
void check_available(size_t num_bytes);

// Allocates pages of the own region, so that a shortage is an Error(kTransport) here and not a
// SIGBUS at first touch.
void reserve_pages(std::byte* base, const Span& span);

// Maps a peer's memory. Throws Error(kTransport) unless it is sealed at this size.
Mapping map_peer(const UniqueFd& memory, size_t num_bytes, int peer);

}  // namespace rota::transport
