#include "transport/mapping.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "transport/available_memory.h"

namespace rota::transport {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

// Nobody can resize memory under a mapping, or add further seals.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void refuse_reservation(size_t num_bytes, const std::string& why) {
  fail_transport(join("cannot reserve ", num_bytes, " bytes of shared memory for this rank (", why,
                      "; ", available_memory(),
                      " bytes free); free memory, raise the container's limit or ask for smaller "
                      "slot_bytes"));
}

void reserve_in_file(const UniqueFd& memory, size_t num_bytes) {
  if (const int error = posix_fallocate(memory.get(), 0, static_cast<off_t>(num_bytes))) {
    refuse_reservation(num_bytes, with_errno("posix_fallocate", error));
  }
}

// Populates whole pages, from the one in which the span begins.
int populate(std::byte* base, const Span& span) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = span.offset / page_bytes * page_bytes;
  const size_t end = span.offset + span.num_bytes;
  return madvise(base + begin, end - begin, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
}

}  // namespace

UniqueFd create_memory(const char* name, size_t num_bytes) {
  UniqueFd memory(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) {
    fail_transport(with_errno("cannot make shared memory: memfd_create", errno) +
                   "; raise `ulimit -n`, or let the container allow this system call");
  }
  if (ftruncate(memory.get(), static_cast<off_t>(num_bytes)) != 0) {
    refuse_reservation(num_bytes, with_errno("ftruncate", errno));
  }
  return memory;
}

void seal(const UniqueFd& memory) {
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    fail_transport(with_errno("cannot seal shared memory", errno));
  }
}

std::optional<size_t> sealed_bytes(const UniqueFd& memory) {
  struct stat status{};
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(memory.get(), &status) != 0) {
    return std::nullopt;
  }
  return static_cast<size_t>(status.st_size);
}

Mapping::Mapping(const UniqueFd& memory, size_t num_bytes, Access access, size_t offset)
    : base_(nullptr, Unmap{num_bytes}) {
  const int protection = access == Access::kReader ? PROT_READ : PROT_READ | PROT_WRITE;
  void* address =
      mmap(nullptr, num_bytes, protection, MAP_SHARED, memory.get(), static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    fail_transport(with_errno("cannot map shared memory", errno));
  }
  base_.reset(static_cast<std::byte*>(address));
  // If a page is larger than the control block, it also holds messages and must stay writable.
  const bool is_protectable = sysconf(_SC_PAGESIZE) <= static_cast<long>(sizeof(ControlBlock));
  if (access == Access::kPeer && is_protectable &&
      mprotect(address, sizeof(ControlBlock), PROT_READ) != 0) {
    fail_transport(with_errno("cannot protect shared memory", errno));
  }
}

void Mapping::Unmap::operator()(std::byte* base) const { munmap(base, num_bytes); }

OwnMemory OwnMemory::make(const Geometry& geometry, int world_size) {
  const size_t num_bytes = geometry.num_bytes(world_size);
  UniqueFd memory = create_memory("rota", num_bytes);
  reserve_in_file(memory, sizeof(ControlBlock));
  Mapping region(memory, num_bytes, Mapping::Access::kOwner);
  const bool can_reserve_later = populate(region.base(), {0, sizeof(ControlBlock)}) == 0;
  if (!can_reserve_later) {
    check_available(num_bytes);
    reserve_in_file(memory, num_bytes);
  }
  seal(memory);
  return {std::move(memory), std::move(region), !can_reserve_later};
}

void check_available(size_t num_bytes) {
  if (num_bytes > available_memory()) {
    refuse_reservation(num_bytes, "that is more than there is");
  }
}

void reserve_pages(std::byte* base, const Span& span) {
  check_available(span.num_bytes);
  if (const int error = populate(base, span)) {
    refuse_reservation(span.num_bytes, with_errno("madvise", error));
  }
}

Mapping map_peer(const UniqueFd& memory, size_t num_bytes, int peer) {
  const std::optional<size_t> received_bytes = sealed_bytes(memory);
  if (received_bytes != num_bytes) {
    const std::string received = received_bytes ? join("memory of ", *received_bytes, " bytes")
                                                : "memory that is not sealed";
    fail_transport(join("rank ", peer, " handed over ", received, ", expected ", num_bytes,
                        " sealed bytes; do all ranks run the same version of rota?"));
  }
  return Mapping(memory, num_bytes, Mapping::Access::kPeer);
}

}  // namespace rota::transport
