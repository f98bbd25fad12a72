#include "transport/peer_processes.h"

#include <poll.h>

#include "base/error.h"

namespace rota::transport {

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
    fail_transport(join("pid ", pid_, " handed over a heap that is not sealed"));
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

std::shared_ptr<PeerProcess> PeerProcesses::find(pid_t pid, UniqueFd pidfd) {
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
