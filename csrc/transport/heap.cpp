#include "transport/heap.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <functional>
#include <iterator>
#include <string_view>

#include "base/error.h"
#include "base/fork_generation.h"
#include "transport/available_memory.h"

namespace rota::transport {
namespace {

constexpr std::string_view kGetMemory = "free memory or raise the container's limit";
constexpr std::string_view kGetAddresses = "raise `ulimit -v`";

[[noreturn]] void refuse(size_t num_bytes, const std::string& why, std::string_view advice) {
  throw Error(ErrorKind::kTransport,
              join("rota.empty: cannot reserve ", num_bytes, " bytes of shared memory (", why, "; ",
                   available_memory(), " bytes free); ", advice));
}

size_t whole_pages(size_t num_bytes) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::max(num_bytes + page_bytes - 1, page_bytes) / page_bytes * page_bytes;
}

// The heap of every peer's process takes address space here, of which a process has 2^47 bytes.
constexpr size_t kMostBytes = size_t{1} << 38;

// What this process may still map; none: any number of bytes.
std::optional<size_t> free_addresses() {
  rlimit addresses{};
  getrlimit(RLIMIT_AS, &addresses);  // `ulimit -v`
  if (addresses.rlim_cur == RLIM_INFINITY) return std::nullopt;
  size_t num_pages = 0;
  in_classic_locale<std::ifstream>("/proc/self/statm") >> num_pages;
  const size_t in_use = num_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return addresses.rlim_cur - std::min<size_t>(in_use, addresses.rlim_cur);
}

size_t heap_bytes() {
  const auto num_pages = static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
  rlimit file_size{};
  getrlimit(RLIMIT_FSIZE, &file_size);  // `ulimit -f`
  const size_t num_bytes = std::min({num_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)),
                                     kMostBytes, static_cast<size_t>(file_size.rlim_cur)});
  const std::optional<size_t> addresses = free_addresses();
  // Half of what is scarce: the other half is the application's.
  return addresses && *addresses / 2 < num_bytes ? whole_pages(*addresses / 2) : num_bytes;
}

// Writes zeros to whole pages. What posix_fallocate() reserves is zeroed later, at the first
// access, in a fault for each page, which takes half as long again in sum (benchmarks/LOG.md).
// Returns 0 or the error.
int write_zeros(const UniqueFd& memory, const Span& span) {
  static constexpr std::array<std::byte, kPageBytes> kZeros{};
  std::array<iovec, 1024> pages;  // as many as Linux takes at once
  pages.fill({const_cast<std::byte*>(kZeros.data()), kZeros.size()});
  const size_t end = span.offset + span.num_bytes;
  for (size_t begin = span.offset; begin < end;) {
    const size_t num_pages = std::min(pages.size(), (end - begin) / kPageBytes);
    const ssize_t written =
        pwritev(memory.get(), pages.data(), static_cast<int>(num_pages), static_cast<off_t>(begin));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    begin += static_cast<size_t>(written) / kPageBytes * kPageBytes;
  }
  return 0;
}

void return_pages(const UniqueFd& memory, const Span& span) {
  fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(span.offset), static_cast<off_t>(span.num_bytes));
}

}  // namespace

Heap::Heap()
    : num_bytes_(heap_bytes()),
      memory_(create_memory("rota-heap", num_bytes_)),
      first_page_(memory_, kPageBytes, Mapping::Access::kOwner),
      fork_generation_(fork_generation()) {
  seal(memory_);
  reserve({0, kPageBytes});
}

void* Heap::allocate(size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  if (num_bytes > available_memory()) {
    refuse(num_bytes, "that is more than there is", kGetMemory);
  }
  if (!mapping_) map_all(num_bytes);
  const size_t whole_bytes = whole_pages(num_bytes);
  const Span span{find_room(whole_bytes), whole_bytes};
  reserve(span);
  in_use_.emplace(span.offset, Block{span.num_bytes});
  return mapping_->base() + span.offset;
}

void Heap::map_all(size_t num_bytes) {
  try {
    mapping_.emplace(memory_, num_bytes_, Mapping::Access::kOwner);
  } catch (const Error&) {
    const std::optional<size_t> addresses = free_addresses();
    if (!addresses) throw;
    refuse(num_bytes,
           join("all of it takes ", num_bytes_, " bytes of addresses, of which ", *addresses,
                " are left"),
           kGetAddresses);
  }
}

size_t Heap::find_room(size_t num_bytes) const {
  size_t end = whole_pages(kPageBytes);
  for (const auto& [offset, block] : in_use_) {
    if (offset - end >= num_bytes) break;
    end = offset + block.num_bytes;
  }
  if (num_bytes > num_bytes_ - end) {
    refuse(num_bytes,
           join("no gap between other tensors is so long in a heap of ", num_bytes_, " bytes"),
           free_addresses() ? kGetAddresses : kGetMemory);
  }
  return end;
}

void Heap::reserve(const Span& span) {
  if (const int error = write_zeros(memory_, span)) {
    return_pages(memory_, span);
    refuse(span.num_bytes, with_errno("pwritev", error), kGetMemory);
  }
}

Heap::Blocks::iterator Heap::find(const void* data) {
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - mapping_->base());
  return std::prev(in_use_.upper_bound(offset));
}

void Heap::release(void* data) {
  if (fork_generation_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  const auto block = find(data);
  block->second.is_released = true;
  free_unless_held(block);
}

void Heap::hold(const void* data) {
  const std::lock_guard lock(mutex_);
  ++find(data)->second.num_holds;
}

void Heap::drop(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto block = find(data);
  --block->second.num_holds;
  if (block->second.is_released) free_unless_held(block);
}

void Heap::free_unless_held(Blocks::iterator block) {
  if (block->second.num_holds > 0) return;
  return_pages(memory_, {block->first, block->second.num_bytes});
  in_use_.erase(block);
}

std::optional<size_t> Heap::offset_of(const void* data) const {
  const std::span<const std::byte> all = contents();
  const auto* first = static_cast<const std::byte*>(data);
  if (std::less<>()(first, all.data()) || !std::less<>()(first, all.data() + all.size())) {
    return std::nullopt;
  }
  return static_cast<size_t>(first - all.data());
}

std::span<const std::byte> Heap::contents() const {
  const std::lock_guard lock(mutex_);
  if (!mapping_) return {};
  return {mapping_->base(), num_bytes_};
}

}  // namespace rota::transport
