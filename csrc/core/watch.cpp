#include "core/watch.h"

#include <cstring>
#include <iostream>

#include "core/point_to_point.h"

namespace rota {

Watch::Watch(const transport::Transport& transport, Nanoseconds timeout,
             const std::function<void()>* check_interrupt)
    : transport_(transport), timeout_(timeout), check_interrupt_(check_interrupt) {}

void Watch::begin_collective(std::string_view collective, uint64_t epoch, bool lets_signals_through,
                             std::optional<Nanoseconds> own_timeout) {
  begin_call(collective, epoch, lets_signals_through);
  is_collective_ = true;
  own_timeout_ = own_timeout;
}

void Watch::begin_call(std::string_view call, uint64_t number, bool lets_signals_through) {
  call_ = call;
  epoch_ = number;
  is_collective_ = false;
  lets_signals_through_ = lets_signals_through;
  own_timeout_ = std::nullopt;
  phase_ = "start";
  step_ = 0;
  has_warned_ = false;
}

void Watch::begin_wait(int peer, std::string_view phase, uint64_t step) {
  peer_ = peer;
  needed_ = peer == kAnyRank ? 0 : uint64_t{1} << peer;
  phase_ = phase;
  step_ = step;
  next_interrupt_check_ = kInterruptCheckEvery;
}

void Watch::begin_wait_for_all(uint64_t peers, std::string_view phase, uint64_t step) {
  begin_wait(kAnyRank, phase, step);
  needed_ = peers;
}

std::optional<Error> Watch::tick(Nanoseconds waited) {
  if (lets_signals_through_ && waited >= next_interrupt_check_) {
    next_interrupt_check_ = waited + kInterruptCheckEvery;
    (*check_interrupt_)();
  }
  PointToPoint::move_all_groups();
  if (auto error = poll()) return error;
  if (auto error = find_death()) return error;
  if (auto error = find_departure()) return error;
  if (waited >= own_timeout_.value_or(timeout())) {
    const std::string who =
        peer_ == kAnyRank ? "any of them" : join("rank ", transport_.number_of(peer_));
    return Error(ErrorKind::kTimeout,
                 join(prefix(), " waited ", milliseconds(waited), " ms for ", awaited(), ' ',
                      place(), ", the timeout of this call; is ", who, " alive?"));
  }
  if (waited >= kStallAfter) warn_about_stall(waited);
  return std::nullopt;
}

std::vector<const LifeWord*> Watch::lives() const {
  std::vector<const LifeWord*> lives;
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    if (needed_ != 0 && (needed_ >> peer & 1) == 0) continue;
    if (const LifeWord* life = transport_.life_of(peer)) lives.push_back(life);
  }
  return lives;
}

std::optional<Error> Watch::find_death() {
  for (const int peer : transport_.find_dead_peers()) {
    // If it closed its communicator before it ended, find_departure() knows more.
    if (has_departed(peer) || has_done_its_part(peer)) continue;
    return cause_of(
        Error(ErrorKind::kPeerFailed, prefix(),
              join(transport_.describe(peer), " has died ", place(), "; restart the job")));
  }
  return std::nullopt;
}

// A peer that fails publishes why before it leaves or ends. Whoever has looked for that earlier may
// have missed it, and finds it now.
Error Watch::cause_of(const Error& loss) { return poll().value_or(loss); }

bool Watch::has_departed(int peer) const {
  return transport_.region(peer).control().departed.load() != 0;
}

bool Watch::has_done_its_part(int peer) const {
  return is_collective_ && transport_.region(peer).control().completed.load() >= epoch_;
}

bool Watch::is_needed(int peer) const {
  return is_collective_ ? !has_done_its_part(peer) : (needed_ >> peer & 1) != 0;
}

std::optional<Error> Watch::find_departure() {
  const auto error = [this](std::string_view who) {
    return cause_of(Error(ErrorKind::kPeerFailed, prefix(),
                          join(who, " has left the group ", place(),
                               "; every rank must do its part of all calls before it closes")));
  };
  bool are_all_gone = true;
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    if (peer == transport_.rank()) continue;
    if (!has_departed(peer)) {
      are_all_gone = false;
    } else if (is_needed(peer)) {
      return error(transport_.describe(peer));
    }
  }
  if (needed_ == 0 && are_all_gone) return error("every other rank");
  return std::nullopt;
}

std::string Watch::awaited() const {
  return peer_ == kAnyRank ? "any other rank" : transport_.describe(peer_);
}

std::string Watch::prefix() const {
  return join("rota.", call_, ": rank ", transport_.number_of_all());
}

std::string Watch::place() const {
  return join("(epoch ", epoch_, ", ", phase_, ", step ", step_, ')');
}

std::optional<Error> Watch::poll() {
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    const transport::ControlBlock& control = transport_.region(peer).control();
    if (control.abort.load_ordered() == 0) continue;  // Communicator::run() explains the order
    // Bounded: the text comes from another process.
    const std::string text(control.abort_text,
                           strnlen(control.abort_text, sizeof(control.abort_text)));
    const bool has_cause = control.abort.payload[1] != 0;
    return Error(static_cast<ErrorKind>(control.abort.payload[0]), prefix(),
                 has_cause ? text : join(transport_.describe(peer), " failed: ", text));
  }
  return std::nullopt;
}

void Watch::warn_about_stall(Nanoseconds waited) {
  if (has_warned_) return;
  has_warned_ = true;
  std::cerr << join(prefix(), " has waited ", milliseconds(waited), " ms for ", awaited(), ' ',
                    place(), "; still waiting\n");
}

}  // namespace rota
