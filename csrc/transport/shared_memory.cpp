#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "transport/available_memory.h"
#include "transport/bootstrap.h"

namespace rota::transport {
namespace {

// Nobody can change the size under a mapping, or lift that.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void refuse_reservation(size_t num_bytes, uint64_t have, const std::string& why) {
  throw Error(ErrorKind::kTransport,
              join("rota: cannot reserve ", num_bytes, " bytes of shared memory for this rank (",
                   why, "; ", have,
                   " bytes free); free memory, raise the container's limit or ask for "
                   "smaller slot_bytes"));
}

// Pages are taken now: a shortage is an error here and never a SIGBUS at first touch. Beyond a
// cgroup's limit posix_fallocate does not fail, it wakes the OOM killer; hence the look before it.
UniqueFd reserve_memory(size_t num_bytes) {
  UniqueFd memory(memfd_create("rota", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) throw Error(ErrorKind::kTransport, with_errno("memfd_create", errno));
  const uint64_t have = available_memory();
  if (num_bytes > have) refuse_reservation(num_bytes, have, "that is more than there is");
  if (const int error = posix_fallocate(memory.get(), 0, static_cast<off_t>(num_bytes))) {
    refuse_reservation(num_bytes, have, with_errno("posix_fallocate", error));
  }
  return memory;
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

UniqueFd open_status(pid_t pid) {
  return UniqueFd(open(join("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
}

// Whether the kernel has begun to end the process. False where that cannot be read, and once it has
// ended, when its pidfd says so.
bool is_exiting(const UniqueFd& status) {
  constexpr uint64_t kPfExiting = 4;
  char text[1024];
  const ssize_t size = pread(status.get(), text, sizeof(text) - 1, 0);
  if (size <= 0) return false;
  text[size] = '\0';
  // "4711 (name) S ppid pgrp session tty tpgid flags ...", where the name may hold anything.
  const char* after_name = std::strrchr(text, ')');
  uint64_t flags = 0;
  return after_name != nullptr &&
         std::sscanf(after_name, ") %*c %*d %*d %*d %*d %*d %" SCNu64, &flags) == 1 &&
         (flags & kPfExiting) != 0;
}

}  // namespace

Mapping::Mapping(const UniqueFd& memory, size_t num_bytes, Access access) : num_bytes_(num_bytes) {
  // MAP_POPULATE: the page table is filled now, not by faults in the first collectives.
  void* address =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory.get(), 0);
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
  const size_t num_bytes = geometry.num_bytes();
  UniqueFd memory = reserve_memory(num_bytes);
  Mapping own(memory, num_bytes, Mapping::Access::kOwner);
  seal(memory);

  Bootstrap bootstrap(store, rank, world_size, geometry, timeout, check_interrupt);
  std::vector<Introduction> introductions = bootstrap.exchange(memory);

  std::vector<Peer> peers;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) {
      peers.push_back({getpid(), UniqueFd(), UniqueFd(), std::move(own)});
      continue;
    }
    Introduction& introduction = introductions[static_cast<size_t>(peer)];
    verify_sealed(introduction.memory, num_bytes, peer);
    peers.push_back({introduction.pid, std::move(introduction.process),
                     open_status(introduction.pid),
                     Mapping(introduction.memory, num_bytes, Mapping::Access::kPeer)});
  }
  return std::unique_ptr<Transport>(new SharedMemoryTransport(rank, geometry, std::move(peers)));
}

SharedMemoryTransport::SharedMemoryTransport(int rank, const Geometry& geometry,
                                             std::vector<Peer> peers)
    : Transport(rank, geometry, regions_of(peers, geometry)), peers_(std::move(peers)) {}

std::string SharedMemoryTransport::describe(int peer) const {
  return join("rank ", peer, " (pid ", peers_[static_cast<size_t>(peer)].pid, ")");
}

std::vector<int> SharedMemoryTransport::find_dead_peers(int awaited) const {
  std::vector<pollfd> polls;
  for (const Peer& peer : peers_) {
    // poll() skips negative descriptors, such as the own one.
    polls.push_back({.fd = peer.process.get(), .events = POLLIN, .revents = 0});
  }
  std::vector<int> dead;
  if (is_exiting(peers_[static_cast<size_t>(awaited)].status)) dead.push_back(awaited);
  if (poll(polls.data(), polls.size(), 0) <= 0) return dead;
  for (size_t peer = 0; peer < polls.size(); ++peer) {
    if (polls[peer].revents != 0) dead.push_back(static_cast<int>(peer));
  }
  return dead;
}

}  // namespace rota::transport
