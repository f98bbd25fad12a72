#include "transport/host.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/cores.h"
#include "base/error.h"

namespace rota::transport {
namespace {

// Empty if the system has none. Any other failure to read it, such as a lack of descriptors,
// throws, because an empty id would look like another host.
std::string boot_id() {
  const UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char id[64];
  const ssize_t size = file.get() < 0 ? -1 : read(file.get(), id, sizeof(id));
  if (size < 0 && errno != ENOENT) {
    throw Error(ErrorKind::kTransport,
                join(with_errno("rota: cannot read this host's boot id", errno),
                     errno == EMFILE ? "; raise `ulimit -n`" : ""));
  }
  const std::string_view text(id, static_cast<size_t>(std::max(size, ssize_t{0})));
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

std::string host_id() {
  if (const char* id = std::getenv("ROTA_HOST_ID")) {
    // It becomes the end of a line (Bootstrap).
    if (std::strchr(id, '\n') == nullptr) return id;
    throw Error(ErrorKind::kTransport,
                join("rota: ROTA_HOST_ID is '", id, "', expected text without a line break"));
  }
  char network[64] = {};
  if (readlink("/proc/self/ns/net", network, sizeof(network) - 1) < 0) network[0] = '\0';
  return join(boot_id(), "/", network);
}

std::optional<int> numa_node_of(const std::vector<int>& cpus, const std::string& directory) {
  std::optional<int> found;
  int num_with_cpus = 0;
  std::error_code none;  // then there are no entries
  for (const auto& entry : std::filesystem::directory_iterator(directory, none)) {
    int number = 0;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &number) != 1) continue;
    auto cpulist = in_classic_locale<std::ifstream>(entry.path() / "cpulist");
    const std::vector<int> of_node = parse_cores(cpulist);
    if (of_node.empty()) continue;
    ++num_with_cpus;
    const auto is_of_node = [&](int cpu) {
      return std::ranges::find(of_node, cpu) != of_node.end();
    };
    if (std::ranges::all_of(cpus, is_of_node)) found = number;
  }
  return num_with_cpus < 2 || cpus.empty() ? std::nullopt : found;
}

NumaNode numa_node() {
  if (const char* text = std::getenv("ROTA_NUMA_NODE")) {
    int number = -1;
    const char* end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, number);
    if (error != std::errc() || rest != end || number < 0) {
      throw Error(ErrorKind::kTransport,
                  join("rota: ROTA_NUMA_NODE is '", text, "', expected a number, 0 or more"));
    }
    return {number, true};
  }
  return {numa_node_of(usable_cores(), "/sys/devices/system/node"), false};
}

std::vector<size_t> PeerProcess::find_ended(const std::vector<const PeerProcess*>& processes) {
  std::vector<pollfd> polls;
  for (const PeerProcess* process : processes) {
    // poll() skips negative descriptors, such as that of the own process.
    polls.push_back({.fd = process->pidfd_.get(), .events = POLLIN, .revents = 0});
  }
  std::vector<size_t> ended;
  if (poll(polls.data(), polls.size(), 0) <= 0) return ended;
  for (size_t i = 0; i < polls.size(); ++i) {
    if (polls[i].revents != 0) ended.push_back(i);
  }
  return ended;
}

bool PeerProcess::is_running() const {
  if (const LifeWord* word = life()) {
    if (LifeWord::is_held(word->load())) return true;
    if (word->is_ending()) return false;
  }
  return find_ended({this}).empty();
}

void PeerProcess::take_words(const UniqueFd& heap) {
  const std::lock_guard lock(mutex_);
  if (words_) return;
  try {
    words_.emplace(heap, sizeof(ProcessWords), Mapping::Access::kReader);
  } catch (const Error&) {
    // As below. The end of the process is then noticed later.
  }
}

void PeerProcess::take_heap(const UniqueFd& memory) {
  const std::optional<size_t> num_bytes = sealed_bytes(memory);
  if (!num_bytes) {
    throw Error(ErrorKind::kTransport,
                join("rota: pid ", pid_, " handed over a heap that is not sealed"));
  }
  take_words(memory);
  const std::lock_guard lock(mutex_);
  if (heap_) return;
  try {
    heap_.emplace(memory, *num_bytes, Mapping::Access::kReader);
    heap_bytes_ = *num_bytes;
  } catch (const Error&) {
    // Too little address space, as under `ulimit -v`. Data then goes through slots instead.
  }
}

std::span<const std::byte> PeerProcess::heap() const {
  const std::lock_guard lock(mutex_);
  if (!heap_) return {};
  return {heap_->base(), heap_bytes_};
}

std::shared_ptr<PeerProcess> Host::find_process(pid_t pid, UniqueFd pidfd) {
  auto process = std::make_shared<PeerProcess>(pid, std::move(pidfd));
  // All processes of other PID namespaces appear as pid 0, so it identifies none of them.
  if (pid == 0) return process;
  const std::lock_guard lock(mutex_);
  std::erase_if(processes_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<PeerProcess>& known = processes_[pid];
  // A pid is reused only after its owner has ended. If neither the known process nor the new one
  // has ended, they are the same process.
  if (auto same = known.lock();
      same && PeerProcess::find_ended({process.get(), same.get()}).empty()) {
    return same;
  }
  known = process;
  return process;
}

}  // namespace rota::transport
