#include "core/window.h"

#include <algorithm>
#include <cstring>

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

// Returns the sleep flags of this host's ranks, but for one of them.
std::vector<const Flag*> sleep_flags(const std::vector<RankWindow>& ranks, int left_out = -1) {
  std::vector<const Flag*> flags;
  for (size_t peer = 0; peer < ranks.size(); ++peer) {
    if (static_cast<int>(peer) == left_out || ranks[peer].is_remote) continue;
    flags.push_back(&ranks[peer].view.control->sleeping);
  }
  return flags;
}

// Ranks of other hosts have threads that move their messages, so nobody spins beside them.
WaitPolicy policy_of(const std::vector<RankWindow>& ranks) {
  if (std::ranges::any_of(ranks, &RankWindow::is_remote)) return {};
  return WaitPolicy::for_ranks(static_cast<int>(ranks.size()));
}

}  // namespace

class Window::Watch final : public WindowWatch {
 public:
  // call: for errors. what: is awaited of the ranks.
  Watch(const Window& window, std::span<const int> ranks, std::string_view call, std::string what,
        Nanoseconds timeout, const std::function<void()>& check_interrupt)
      : WindowWatch(timeout, check_interrupt),
        window_(window),
        ranks_(ranks),
        call_(call),
        what_(std::move(what)) {}

 private:
  bool is_anyone_left() const override {
    return window_.is_taken_for_alive(window_.rank_) &&
           std::ranges::any_of(ranks_, [&](int rank) { return window_.is_taken_for_alive(rank); });
  }
  std::vector<const LifeWord*> lives() const override {
    std::vector<const LifeWord*> lives;
    for (const int rank : ranks_) {
      const auto& process = window_.ranks_[static_cast<size_t>(rank)].process;
      if (process) lives.push_back(process->life());
    }
    return lives;
  }
  std::string prefix() const override { return window_.prefix(call_); }
  std::string awaited() const override {
    std::string names;
    for (const int rank : ranks_) names += join(names.empty() ? "" : ", ", window_.describe(rank));
    return names + what_;
  }
  std::string end_of_awaited() const override {
    if (ranks_.size() == 1 && window_.is_remote(ranks_[0])) {
      if (const auto loss = window_.remote_->loss_of(ranks_[0])) return "it " + *loss;
    }
    return WindowWatch::end_of_awaited();
  }

  const Window& window_;
  const std::span<const int> ranks_;
  const std::string_view call_;
  const std::string what_;
};

Window::Window(int rank, std::vector<RankWindow> ranks, int num_channels, Options options,
               std::shared_ptr<RemoteRanks> remote)
    : rank_(rank),
      ranks_(std::move(ranks)),
      num_channels_(num_channels),
      options_(std::move(options)),
      fork_generation_(fork_generation()),
      remote_(std::move(remote)),
      waiter_(&ranks_[static_cast<size_t>(rank)].view.control->sleeping, sleep_flags(ranks_, rank)),
      server_(nullptr, sleep_flags(ranks_)),
      policy_(policy_of(ranks_)),
      num_sent_(num_words(world_size(), num_channels)),
      num_taken_(num_words(world_size(), num_channels)) {}

std::string Window::prefix(std::string_view call) const {
  const std::string rank = join("rank ", rank_, '/', world_size());
  return call.empty() ? rank : join("rota.Window.", call, ": ", rank);
}

std::string Window::describe(int rank) const {
  if (is_remote(rank)) return remote_->describe(rank);
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
    return is_remote(target) ? nullptr : data.data() + offset * elem_bytes;
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
  if (!process || process->is_running()) return window;
  throw Error(ErrorKind::kPeerFailed,
              join(prefix(call), ": ", describe(target),
                   " has died, so nobody would read what is written to its window"));
}

void Window::check_channel(std::string_view call, int channel) const {
  if (channel >= 0 && channel < num_channels_) return;
  throw Error(ErrorKind::kValue, join(prefix(call), ": the channel is ", channel,
                                      ", expected 0 to ", num_channels_ - 1));
}

template <typename Body>
auto Window::remotely(std::string_view call, int target, const Body& body) const {
  if (const auto loss = remote_->loss_of(target)) {
    throw Error(ErrorKind::kPeerFailed, join(prefix(call), ": ", describe(target), ' ', *loss));
  }
  Watch watch(*this, {&target, 1}, call, ", which has not answered", options_.timeout,
              options_.check_interrupt);
  try {
    return body(watch);
  } catch (const RemoteFailure& failure) {
    throw Error(failure.kind, join(prefix(call), ": ", failure.text));
  }
}

bool Window::is_taken_for_alive(int rank) const {
  const RankWindow& window = ranks_[static_cast<size_t>(rank)];
  if (window.is_remote) return !remote_->loss_of(rank);
  if (!window.process) return window.view.control->closed.load() == 0;
  return is_open(*window.view.control, *window.process);
}

bool Window::is_alive(int rank) const {
  checked("is_alive", rank);
  if (!is_remote(rank)) return is_taken_for_alive(rank);
  try {
    return remotely("is_alive", rank, [&](Watch& watch) { return remote_->is_open(rank, watch); });
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerFailed) return false;
    throw;
  }
}

const transport::WindowView& Window::view(int rank) const {
  checked("view", rank);
  if (!is_remote(rank)) return opened("view", rank).view;
  throw Error(ErrorKind::kValue, join(prefix("view"), ": ", describe(rank),
                                      " has memory that cannot be mapped here; use get"));
}

void Window::put(int target, uint64_t offset, const void* data, uint64_t num_elems,
                 size_t elem_bytes) {
  std::byte* memory = elements("put", target, offset, num_elems, elem_bytes);
  const uint64_t num_bytes = num_elems * elem_bytes;
  if (is_remote(target)) {
    return remotely("put", target, [&](Watch& watch) {
      remote_->put(target, offset * elem_bytes, {static_cast<const std::byte*>(data), num_bytes},
                   watch);
    });
  }
  running("put", target);
  cpu::OutputCopier(num_bytes, 1).copy(memory, data, num_bytes);
}

void Window::get(int target, uint64_t offset, void* data, uint64_t num_elems, size_t elem_bytes) {
  const std::byte* memory = elements("get", target, offset, num_elems, elem_bytes);
  const uint64_t num_bytes = num_elems * elem_bytes;
  if (is_remote(target)) {
    return remotely("get", target, [&](Watch& watch) {
      remote_->get(target, offset * elem_bytes, {static_cast<std::byte*>(data), num_bytes}, watch);
    });
  }
  opened("get", target);
  cpu::OutputCopier(num_bytes, 1).copy(data, memory, num_bytes);
  opened("get", target);  // otherwise the owner may have released what was read
}

void Window::accumulate(int target, uint64_t offset, const void* data, DType dtype,
                        uint64_t num_elems, const std::optional<WireFormat>& wire) {
  const size_t elem_bytes = info(dtype).num_bytes;
  elements("accumulate", target, offset, num_elems, elem_bytes);
  const auto* bytes = static_cast<const std::byte*>(data);
  if (is_remote(target)) {
    return remotely("accumulate", target, [&](Watch& watch) {
      remote_->accumulate(target, offset, bytes, dtype, num_elems, wire, watch);
    });
  }
  const transport::WindowView& view = running("accumulate", target).view;
  const LockWait wait{"accumulate", options_.check_interrupt};
  if (!wire) return add_to_chunks(view, offset, bytes, dtype, num_elems, wait);
  std::vector<std::byte> encoded(wire->num_bytes(kPartElems));
  add_parts(view, offset, *wire, num_elems, wait, [&](uint64_t begin, uint64_t part_elems) {
    const WirePlace place = wire->place(encoded.data(), kPartElems);
    const auto* part = static_cast<const float*>(data) + begin;
    cpu::element_loops().wire(*wire).encode(part, place, part_elems, 1);
    return place;
  });
}

template <typename PlaceOf>
void Window::add_parts(const transport::WindowView& view, uint64_t offset, const WireFormat& wire,
                       uint64_t num_elems, const LockWait& wait, const PlaceOf& place_of) {
  std::vector<float> decoded(kPartElems);
  for (uint64_t begin = 0; begin < num_elems; begin += kPartElems) {
    const uint64_t part_elems = std::min(kPartElems, num_elems - begin);
    const WirePlace place = place_of(begin, part_elems);
    cpu::element_loops().wire(wire).decode_sum({.srcs = &place, .num = 1}, decoded.data(),
                                               part_elems, 1);
    add_to_chunks(view, offset + begin, reinterpret_cast<const std::byte*>(decoded.data()),
                  DType::kFloat32, part_elems, wait);
  }
}

void Window::add_to_chunks(const transport::WindowView& view, uint64_t offset,
                           const std::byte* data, DType dtype, uint64_t num_elems,
                           const LockWait& wait) {
  const size_t elem_bytes = info(dtype).num_bytes;
  const uint64_t chunk_elems = kWindowChunkBytes / elem_bytes;
  const cpu::ReduceFn add = cpu::element_loops().reduce(dtype, ReduceOp::kSum);
  for (uint64_t elem = offset; elem < offset + num_elems;) {
    const uint64_t chunk = elem / chunk_elems;
    const uint64_t end = std::min((chunk + 1) * chunk_elems, offset + num_elems);
    std::byte* sum = view.data.data() + elem * elem_bytes;
    const void* srcs[] = {sum, data + (elem - offset) * elem_bytes};
    Flag& lock = view.control->locks[chunk % transport::kNumWindowLocks];
    lock_chunk(lock, wait);
    add({.srcs = srcs, .num = 2}, sum, end - elem, 1);
    unlock_chunk(lock);
    elem = end;
  }
}

void Window::lock_chunk(Flag& lock, const LockWait& wait) {
  while (true) {
    const uint64_t seen = lock.load();
    const uint64_t holder = holder_of(seen);
    if (holder == 0) {
      if (lock.try_change(seen, seen + static_cast<uint64_t>(rank_) + 1)) return;
      continue;
    }
    const int rank = static_cast<int>(holder) - 1;
    Watch watch(*this, {&rank, 1}, wait.call, ", which adds to the same chunk", options_.timeout,
                wait.check_interrupt);
    waiter_.wait(lock, next_free(seen), policy_, watch);
  }
}

// Whoever waits for the lock sleeps on the same flag.
void Window::unlock_chunk(Flag& lock) { server_.publish(lock, next_free(lock.load())); }

Flag& Window::signals(int target, int source, int channel) const {
  return ranks_[static_cast<size_t>(target)].view.control->word(index(source, channel));
}

void Window::signal(int target, int channel) {
  checked("signal", target);
  if (!is_remote(target)) opened("signal", target);
  check_channel("signal", channel);
  if (is_remote(target)) {
    return remotely("signal", target,
                    [&](Watch& watch) { remote_->signal(target, channel, watch); });
  }
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
  Watch watch(*this, sources, "wait_signal", join(", a signal on channel ", channel),
              own_timeout.value_or(options_.timeout), options_.check_interrupt);
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

// ---- what ranks on other hosts ask for

void Window::serve_put(uint64_t first_byte, std::span<const std::byte> data) {
  std::byte* memory = elements("", rank_, first_byte, data.size(), 1);
  cpu::OutputCopier(data.size(), 1).copy(memory, data.data(), data.size());
}

void Window::serve_get(uint64_t first_byte, std::span<std::byte> data) const {
  const std::byte* memory = elements("", rank_, first_byte, data.size(), 1);
  std::memcpy(data.data(), memory, data.size());
}

void Window::serve_accumulate(uint64_t offset, const std::byte* data, DType dtype,
                              uint64_t num_elems, const std::optional<WireFormat>& wire,
                              const std::function<void()>& still_waits) {
  elements("", rank_, offset, num_elems, info(dtype).num_bytes);
  const transport::WindowView& view = ranks_[static_cast<size_t>(rank_)].view;
  const LockWait wait{"", still_waits};
  if (!wire) return add_to_chunks(view, offset, data, dtype, num_elems, wait);
  const WirePlace all = wire->place(const_cast<std::byte*>(data), num_elems);
  add_parts(view, offset, *wire, num_elems, wait,
            [&](uint64_t begin, uint64_t) { return wire->from(all, begin); });
}

void Window::serve_signal(int source, int channel) {
  check_channel("", channel);
  Flag& flag = signals(rank_, source, channel);
  server_.publish(flag, flag.load() + 1);
}

}  // namespace rota
