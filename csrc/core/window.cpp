#include "core/window.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/fork_generation.h"
#include "core/window_watch.h"
#include "cpu/copy.h"
#include "cpu/element_loops.h"

namespace rota {
namespace {

// A lock is one flag: k * kLockStep while it is free after k holders, and that plus the rank + 1
// while a rank holds it. It only grows, and whoever sees it held also sees by whom.
constexpr uint64_t kLockStep = 1 << 16;

uint64_t holder_of(uint64_t lock) { return lock % kLockStep; }
uint64_t next_free(uint64_t lock) { return (lock / kLockStep + 1) * kLockStep; }

// Contributions are rounded in parts of this length, which is a multiple of every block's.
constexpr uint64_t kPartElems = kWindowChunkBytes / sizeof(float);
using Part = std::array<float, kPartElems>;

std::vector<const Flag*> sleep_flags_of_others(int rank, const std::vector<RankWindow>& ranks) {
  std::vector<const Flag*> flags;
  for (size_t peer = 0; peer < ranks.size(); ++peer) {
    if (peer != static_cast<size_t>(rank)) flags.push_back(&ranks[peer].view.control->sleeping);
  }
  return flags;
}

}  // namespace

class Window::Watch final : public WindowWatch {
 public:
  // channel: of the awaited signal; none: a lock is awaited.
  Watch(const Window& window, std::span<const int> ranks, std::optional<int> channel,
        Nanoseconds timeout)
      : WindowWatch(timeout, window.options_.check_interrupt),
        window_(window),
        ranks_(ranks),
        channel_(channel) {}

 private:
  bool is_anyone_left() const override {
    return window_.is_alive(window_.rank_) &&
           std::ranges::any_of(ranks_, [&](int rank) { return window_.is_alive(rank); });
  }
  std::string prefix() const override {
    return window_.prefix(channel_ ? "wait_signal" : "accumulate");
  }
  std::string awaited() const override {
    std::string names;
    for (const int rank : ranks_) names += join(names.empty() ? "" : ", ", window_.describe(rank));
    return names + (channel_ ? join(", a signal on channel ", *channel_)
                             : ", which adds to the same chunk");
  }

  const Window& window_;
  const std::span<const int> ranks_;
  const std::optional<int> channel_;
};

Window::Window(int rank, std::vector<RankWindow> ranks, int num_channels, Options options)
    : rank_(rank),
      ranks_(std::move(ranks)),
      num_channels_(num_channels),
      options_(std::move(options)),
      fork_generation_(fork_generation()),
      waiter_(&ranks_[static_cast<size_t>(rank)].view.control->sleeping,
              sleep_flags_of_others(rank, ranks_)),
      policy_(WaitPolicy::for_ranks(static_cast<int>(ranks_.size()))),
      num_sent_(num_words(world_size(), num_channels)),
      num_taken_(num_words(world_size(), num_channels)) {}

std::string Window::prefix(std::string_view call) const {
  return join("rota.Window.", call, ": rank ", rank_, '/', world_size());
}

std::string Window::describe(int rank) const {
  const auto& process = ranks_[static_cast<size_t>(rank)].process;
  return process ? join("rank ", rank, " (pid ", process->pid(), ')') : join("rank ", rank);
}

const RankWindow& Window::checked(std::string_view call, int target) const {
  if (fork_generation_ != fork_generation()) {
    throw Error(ErrorKind::kInternal,
                join(prefix(call),
                     ": this window belongs to the parent process; make a new one after fork"));
  }
  if (target < 0 || target >= world_size()) {
    throw Error(ErrorKind::kValue,
                join(prefix(call), ": the rank is ", target, ", expected 0 to ", world_size() - 1));
  }
  return ranks_[static_cast<size_t>(target)];
}

std::byte* Window::elements(std::string_view call, int target, uint64_t offset, uint64_t num_elems,
                            size_t elem_bytes) const {
  const std::span<std::byte> data = checked(call, target).view.data;
  const uint64_t window_elems = data.size() / elem_bytes;
  if (offset <= window_elems && num_elems <= window_elems - offset) {
    return data.data() + offset * elem_bytes;
  }
  throw Error(ErrorKind::kValue,
              join(prefix(call), ": elements ", offset, " to ", offset + num_elems, " of rank ",
                   target, "'s window, which has ", window_elems));
}

const RankWindow& Window::opened(std::string_view call, int target) const {
  const RankWindow& window = checked(call, target);
  if (window.view.control->closed.load() == 0) return window;
  throw Error(ErrorKind::kPeerFailed,
              join(prefix(call), ": ", describe(target),
                   " has closed its window; make a new one with the ranks that are left"));
}

const RankWindow& Window::running(std::string_view call, int target) const {
  const RankWindow& window = opened(call, target);
  const auto& process = window.process;
  if (!process || transport::PeerProcess::find_ended({process.get()}).empty()) return window;
  throw Error(ErrorKind::kPeerFailed,
              join(prefix(call), ": ", describe(target),
                   " has died, so nobody would read what is written to its window"));
}

void Window::check_channel(std::string_view call, int channel) const {
  if (channel >= 0 && channel < num_channels_) return;
  throw Error(ErrorKind::kValue, join(prefix(call), ": the channel is ", channel,
                                      ", expected 0 to ", num_channels_ - 1));
}

bool Window::is_alive(int rank) const {
  const RankWindow& window = checked("is_alive", rank);
  if (!window.process) return window.view.control->closed.load() == 0;
  return is_open(*window.view.control, *window.process);
}

const transport::WindowView& Window::view(int rank) const { return opened("view", rank).view; }

void Window::put(int target, uint64_t offset, const void* data, uint64_t num_elems,
                 size_t elem_bytes) {
  std::byte* memory = elements("put", target, offset, num_elems, elem_bytes);
  running("put", target);
  const uint64_t num_bytes = num_elems * elem_bytes;
  cpu::OutputCopier(num_bytes, 1).copy(memory, data, num_bytes);
}

void Window::get(int target, uint64_t offset, void* data, uint64_t num_elems, size_t elem_bytes) {
  const std::byte* memory = elements("get", target, offset, num_elems, elem_bytes);
  opened("get", target);
  const uint64_t num_bytes = num_elems * elem_bytes;
  cpu::OutputCopier(num_bytes, 1).copy(data, memory, num_bytes);
  opened("get", target);  // otherwise the owner may have released what was read
}

void Window::accumulate(int target, uint64_t offset, const void* data, DType dtype,
                        uint64_t num_elems, const std::optional<WireFormat>& wire) {
  const size_t elem_bytes = info(dtype).num_bytes;
  elements("accumulate", target, offset, num_elems, elem_bytes);
  const transport::WindowView& view = running("accumulate", target).view;
  const cpu::ElementLoops& loops = cpu::element_loops();
  const cpu::ReduceFn add = loops.reduce(dtype, ReduceOp::kSum);
  const uint64_t chunk_elems = kWindowChunkBytes / elem_bytes;

  std::unique_ptr<Part> rounded;
  std::vector<std::byte> encoded;
  if (wire) {
    rounded = std::make_unique<Part>();
    encoded.resize(wire->num_bytes(kPartElems));
  }
  for (uint64_t begin = 0; begin < num_elems; begin += kPartElems) {
    const uint64_t part_elems = std::min(kPartElems, num_elems - begin);
    const std::byte* part = static_cast<const std::byte*>(data) + begin * elem_bytes;
    if (wire) {
      const WirePlace place = wire->place(encoded.data(), kPartElems);
      loops.wire(*wire).encode(reinterpret_cast<const float*>(part), place, part_elems, 1);
      loops.wire(*wire).decode_sum({.srcs = &place, .num = 1}, rounded->data(), part_elems, 1);
      part = reinterpret_cast<const std::byte*>(rounded->data());
    }
    for (uint64_t elem = offset + begin; elem < offset + begin + part_elems;) {
      const uint64_t chunk = elem / chunk_elems;
      const uint64_t end = std::min((chunk + 1) * chunk_elems, offset + begin + part_elems);
      std::byte* sum = view.data.data() + elem * elem_bytes;
      const void* srcs[] = {sum, part + (elem - offset - begin) * elem_bytes};
      Flag& lock = view.control->locks[chunk % transport::kNumWindowLocks];
      lock_chunk(lock);
      add({.srcs = srcs, .num = 2}, sum, end - elem, 1);
      unlock_chunk(lock);
      elem = end;
    }
  }
}

void Window::lock_chunk(Flag& lock) {
  while (true) {
    const uint64_t seen = lock.load();
    const uint64_t holder = holder_of(seen);
    if (holder == 0) {
      if (lock.try_change(seen, seen + static_cast<uint64_t>(rank_) + 1)) return;
      continue;
    }
    const int rank = static_cast<int>(holder) - 1;
    Watch watch(*this, {&rank, 1}, std::nullopt, options_.timeout);
    waiter_.wait(lock, next_free(seen), policy_, watch);
  }
}

// Whoever waits for the lock sleeps on the same flag.
void Window::unlock_chunk(Flag& lock) { waiter_.publish(lock, next_free(lock.load())); }

Flag& Window::signals(int target, int source, int channel) const {
  return ranks_[static_cast<size_t>(target)].view.control->word(index(source, channel));
}

void Window::signal(int target, int channel) {
  opened("signal", target);
  check_channel("signal", channel);
  running("signal", target);
  const std::lock_guard lock(mutex_);
  waiter_.publish(signals(target, rank_, channel), ++num_sent_[index(target, channel)]);
}

void Window::wait_signal(int source, int channel, std::optional<Nanoseconds> own_timeout) {
  wait_any_signal({&source, 1}, channel, own_timeout);
}

int Window::wait_any_signal(std::span<const int> sources, int channel,
                            std::optional<Nanoseconds> own_timeout) {
  check_channel("wait_signal", channel);
  if (sources.empty() || sources.size() > Waiter::kMaxAwaited) {
    throw Error(ErrorKind::kValue, join(prefix("wait_signal"), ": ", sources.size(),
                                        " ranks, expected 1 to ", Waiter::kMaxAwaited));
  }
  for (const int source : sources) checked("wait_signal", source);
  Watch watch(*this, sources, channel, own_timeout.value_or(options_.timeout));
  while (true) {
    std::vector<Awaited> awaited;
    {
      const std::lock_guard lock(mutex_);
      for (const int source : sources) {
        uint64_t& num_taken = num_taken_[index(source, channel)];
        const Awaited next{&signals(rank_, source, channel), num_taken + 1};
        if (next.is_there()) {
          ++num_taken;
          return source;
        }
        awaited.push_back(next);
      }
    }
    // Another thread may take the signal first.
    waiter_.wait_any(awaited, policy_, watch);
  }
}

uint64_t Window::num_signals(int source, int channel) const {
  checked("num_signals", source);
  check_channel("num_signals", channel);
  const std::lock_guard lock(mutex_);
  return signals(rank_, source, channel).load() - num_taken_[index(source, channel)];
}

}  // namespace rota
