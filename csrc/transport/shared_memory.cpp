#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "transport/available_memory.h"
#include "transport/bootstrap.h"

namespace rota::transport {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

// Nobody can change the size under a mapping, or lift that.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void refuse_reservation(size_t num_bytes, uint64_t have, const std::string& why) {
  throw Error(ErrorKind::kTransport,
              join("rota: cannot reserve ", num_bytes, " bytes of shared memory for this rank (",
                   why, "; ", have,
                   " bytes free); free memory, raise the container's limit or ask for "
                   "smaller slot_bytes"));
}

UniqueFd create_memory(size_t num_bytes) {
  UniqueFd memory(memfd_create("rota", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) throw Error(ErrorKind::kTransport, with_errno("memfd_create", errno));
  if (ftruncate(memory.get(), static_cast<off_t>(num_bytes)) != 0) {
    refuse_reservation(num_bytes, available_memory(), with_errno("ftruncate", errno));
  }
  return memory;
}

// Beyond a cgroup's limit the kernel does not refuse pages, it wakes the OOM killer; hence a look
// before each reservation. Returns what there is.
uint64_t check_available(size_t num_bytes) {
  const uint64_t have = available_memory();
  if (num_bytes > have) refuse_reservation(num_bytes, have, "that is more than there is");
  return have;
}

// reserve() takes pages now and returns an errno: a shortage is an error here and never a SIGBUS at
// first touch.
template <typename Reserve>
void reserve_pages(size_t num_bytes, const char* call, const Reserve& reserve) {
  const uint64_t have = check_available(num_bytes);
  if (const int error = reserve()) refuse_reservation(num_bytes, have, with_errno(call, error));
}

void reserve_in_file(const UniqueFd& memory, size_t num_bytes) {
  reserve_pages(num_bytes, "posix_fallocate",
                [&] { return posix_fallocate(memory.get(), 0, static_cast<off_t>(num_bytes)); });
}

// Whole pages from the one in which the span begins.
int populate(std::byte* base, const Span& span) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = span.offset / page_bytes * page_bytes;
  const size_t end = span.offset + span.num_bytes;
  return madvise(base + begin, end - begin, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
}

void seal(const UniqueFd& memory) {
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    throw Error(ErrorKind::kTransport, with_errno("rota: cannot seal shared memory", errno));
  }
}

// A peer's descriptor is only mapped when it can neither shrink under us nor is smaller than we
// think.
void verify_sealed(const UniqueFd& memory, size_t num_bytes, int peer) {
  struct stat status{};
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(memory.get(), &status) != 0 ||
      static_cast<size_t>(status.st_size) != num_bytes) {
    throw Error(ErrorKind::kTransport,
                join("rota: rank ", peer, " handed over memory of ", status.st_size,
                     " bytes with seals ", seals, ", expected ", num_bytes, " and ", kSeals,
                     "; do all ranks run the same version of rota?"));
  }
}

std::vector<Region> regions_of(const std::vector<Peer>& peers, const Geometry& geometry) {
  std::vector<Region> regions;
  for (const Peer& peer : peers) regions.emplace_back(peer.region.base(), geometry);
  return regions;
}

}  // namespace

Mapping::Mapping(const UniqueFd& memory, size_t num_bytes, Access access) : num_bytes_(num_bytes) {
  void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorKind::kTransport, with_errno("rota: cannot map shared memory", errno));
  }
  base_ = static_cast<std::byte*>(address);
  // Where a page is larger than the control block, it holds messages too and must stay writable.
  const bool is_protectable = sysconf(_SC_PAGESIZE) <= static_cast<long>(sizeof(ControlBlock));
  if (access == Access::kPeer && is_protectable &&
      mprotect(address, sizeof(ControlBlock), PROT_READ) != 0) {
    throw Error(ErrorKind::kTransport, with_errno("rota: cannot protect shared memory", errno));
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), num_bytes_(other.num_bytes_) {}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, num_bytes_);
}

std::unique_ptr<Transport> SharedMemoryTransport::connect(
    Store& store, int rank, int world_size, const Geometry& geometry,
    std::chrono::milliseconds timeout, const std::function<void()>& check_interrupt) {
  const size_t num_bytes = geometry.num_bytes(world_size);
  // Where the first collective could not have its memory, nobody needs to meet.
  check_available(geometry.collectives().num_bytes);
  UniqueFd memory = create_memory(num_bytes);
  reserve_in_file(memory, sizeof(ControlBlock));
  Mapping own(memory, num_bytes, Mapping::Access::kOwner);
  const bool can_reserve_later = populate(own.base(), {0, sizeof(ControlBlock)}) == 0;
  if (!can_reserve_later) reserve_in_file(memory, num_bytes);
  seal(memory);

  Bootstrap bootstrap(store, rank, world_size, geometry, timeout, check_interrupt);
  std::vector<Introduction> introductions = bootstrap.exchange(memory);

  std::vector<Peer> peers;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) {
      peers.push_back(
          {std::make_shared<PeerProcess>(getpid(), UniqueFd(), UniqueFd()), std::move(own)});
      continue;
    }
    Introduction& introduction = introductions[static_cast<size_t>(peer)];
    verify_sealed(introduction.memory, num_bytes, peer);
    peers.push_back({std::move(introduction.process),
                     Mapping(introduction.memory, num_bytes, Mapping::Access::kPeer)});
  }
  return std::unique_ptr<Transport>(
      new SharedMemoryTransport(rank, geometry, std::move(peers), !can_reserve_later));
}

SharedMemoryTransport::SharedMemoryTransport(int rank, const Geometry& geometry,
                                             std::vector<Peer> peers, bool is_reserved)
    : Transport(rank, geometry, regions_of(peers, geometry)),
      peers_(std::move(peers)),
      is_reserved_(is_reserved) {}

void SharedMemoryTransport::reserve(const Span& span) {
  if (is_reserved_) return;
  reserve_pages(span.num_bytes, "madvise", [&] { return populate(own().at(0), span); });
}

std::string SharedMemoryTransport::describe(int peer) const {
  return join("rank ", peer, " (pid ", peers_[static_cast<size_t>(peer)].process->pid(), ")");
}

std::vector<int> SharedMemoryTransport::find_dead_peers(int awaited) const {
  std::vector<const PeerProcess*> processes;
  for (const Peer& peer : peers_) processes.push_back(peer.process.get());
  std::vector<int> dead;
  if (processes[static_cast<size_t>(awaited)]->is_exiting()) dead.push_back(awaited);
  for (const size_t peer : PeerProcess::find_ended(processes)) {
    dead.push_back(static_cast<int>(peer));
  }
  return dead;
}

}  // namespace rota::transport
