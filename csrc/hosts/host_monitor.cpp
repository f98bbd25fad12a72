#include "hosts/host_monitor.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "hosts/bridge.h"

namespace rota::hosts {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSignEvery{300};
// How soon a wait for another host ends once a rank of this host has failed.
constexpr milliseconds kTickWhileWaiting{5};
constexpr milliseconds kTick{20};
// Signs whose sending nobody has waited for; more than a peer leaves unread before it is given up.
constexpr size_t kMostSent = 64;

std::string text_of(const Letter& letter) {
  return {letter.text.data(), strnlen(letter.text.data(), letter.text.size())};
}

void write_text(Letter& letter, const std::string& text) {
  std::strncpy(letter.text.data(), text.c_str(), letter.text.size() - 1);
}

}  // namespace

HostMonitor::HostMonitor(Bridge& bridge)
    : bridge_(bridge),
      engine_(bridge.engine()),
      hosts_(bridge.hosts()),
      local_watch_(bridge.local().transport(), bridge.local().timeout(), nullptr),
      receivers_(hosts_.whose_partner_is(bridge.rank())) {
  const int own_host = bridge.host();
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    if (host != own_host) heard_.emplace(hosts_.partner_of(bridge.rank(), host), Heard{});
  }
  local_watch_.begin_call("wait", 0, /*lets_signals_through=*/false);
  *listening_ = std::thread([this] { listen(); });
  *watching_ = std::thread([this] { watch(); });
}

HostMonitor::~HostMonitor() {
  if (listening_.is_of_parent()) return;
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  woken_->notify_one();
  watching_->join();
  engine_.abort(Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one"));
  listening_->join();
}

void HostMonitor::expect_signs() {
  const std::lock_guard lock(mutex_);
  expects_signs_ = true;
}

void HostMonitor::end_call() {
  const uint64_t number = call_.exchange(0);
  completed_.store(number);
  bridge_.local().record_completed_call(number);
}

void HostMonitor::post_failure(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (has_failed_) return;
  has_failed_ = true;
  to_post_ = error;
  woken_->notify_one();
}

void HostMonitor::listen() {
  while (true) {
    Letter letter;
    Engine::Transfer transfer;
    try {
      transfer = engine_.recv_letter(&letter, sizeof(letter));
    } catch (const Error&) {
      return;
    }
    const std::optional<int> sender = engine_.wait_any(transfer);
    if (!sender) return;
    take(*sender, letter);
  }
}

void HostMonitor::take(int sender, const Letter& letter) {
  if (letter.kind == Letter::Kind::kEnvelope) {
    try {
      return bridge_.inbox().deliver(sender, letter.envelope, engine_);
    } catch (const Error& error) {
      return bridge_.fail(error);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    const auto heard = heard_.find(sender);
    if (heard != heard_.end()) {
      heard->second.silence.end();
      heard->second.has_left |= letter.kind == Letter::Kind::kLeft;
      if (letter.kind == Letter::Kind::kAlive) heard->second.completed = letter.completed;
    }
    if (letter.kind == Letter::Kind::kDied) {
      dead_.try_emplace(static_cast<int>(letter.dead), Dead{text_of(letter), letter.completed});
      woken_->notify_one();
    }
    if (letter.kind != Letter::Kind::kFailed || has_failed_) return;
  }
  const std::string text = text_of(letter);
  bridge_.fail(
      Error(letter.error, prefix(),
            letter.has_cause != 0 ? text : join(hosts_.describe(sender), " failed: ", text)));
}

void HostMonitor::watch() {
  pthread_setname_np(pthread_self(), "rota-hosts");
  auto next_sign = Clock::now();
  std::unique_lock lock(mutex_);
  while (!is_ending_ || to_post_) {
    const std::optional<Error> news = std::exchange(to_post_, std::nullopt);
    const bool has_failed = has_failed_;
    lock.unlock();
    const bool is_waiting = engine_.awaited().has_value();
    if (news) {
      Letter letter{
          .kind = Letter::Kind::kFailed, .error = news->kind(), .has_cause = news->has_cause()};
      write_text(letter, news->told());
      send(letter, kLastWords);
      bridge_.run_failure_hook();
    } else if (!has_failed) {
      const auto now = Clock::now();
      if (now >= next_sign) {
        next_sign = now + kSignEvery;
        send({.completed = completed_.load()}, milliseconds(0));
      }
      look_for_deaths();
      look_for_silence();
      std::optional<Error> error = local_watch_.poll();
      if (!error) error = find_loss();
      if (!error) error = find_overdue();
      if (error) bridge_.fail(*error);
      if (is_waiting) warn_about_stall();
    }
    lock.lock();
    if (to_post_ || is_ending_) continue;
    woken_->wait_for(lock, is_waiting ? kTickWhileWaiting : kTick);
  }
  const bool has_failed = has_failed_;
  lock.unlock();
  if (!has_failed) send({.kind = Letter::Kind::kLeft}, kLastWords);
}

// patience: how long to wait for all of them to be sent; 0: not at all.
void HostMonitor::send(const Letter& letter, milliseconds patience) {
  for (const int peer : receivers_) {
    Sent sent{std::make_unique<Letter>(letter), {}};
    try {
      sent.transfer = engine_.send(sent.letter.get(), sizeof(Letter), peer, kLetterTag);
    } catch (const Error&) {
      continue;  // whoever waits for it will know
    }
    sent_.push_back(std::move(sent));
  }
  if (patience > milliseconds(0)) {
    const auto end = Clock::now() + patience;
    for (Sent& sent : sent_) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
      if (left > milliseconds(0)) Engine::flush(sent.transfer, left);
    }
    sent_.clear();
  }
  while (sent_.size() > kMostSent * receivers_.size()) sent_.pop_front();
}

// Those of this host, of whom this rank tells the other hosts. What a rank says of its calls can be
// read after its death, too.
void HostMonitor::look_for_deaths() {
  const transport::Transport& transport = bridge_.local().transport();
  for (const int peer : transport.find_dead_peers()) {
    const transport::ControlBlock& control = transport.region(peer).control();
    if (control.departed.load() != 0) continue;
    const int number = transport.number_of(peer);
    const Dead dead{transport.describe(peer), control.completed_call.load()};
    {
      const std::lock_guard lock(mutex_);
      if (!dead_.try_emplace(number, dead).second) continue;
    }
    // Some may have heard from no other rank of this host.
    for (const int receiver : hosts_.whose_partner_is(number)) {
      if (std::ranges::count(receivers_, receiver) == 0) receivers_.push_back(receiver);
    }
    Letter letter{.kind = Letter::Kind::kDied, .dead = number, .completed = dead.completed};
    write_text(letter, dead.name);
    send(letter, milliseconds(0));
  }
}

void HostMonitor::look_for_silence() {
  const std::lock_guard lock(mutex_);
  for (auto& [peer, heard] : heard_) {
    if (!expects_signs_ || heard.has_left) continue;
    heard.silence.look();
  }
}

std::optional<Error> HostMonitor::find_loss() {
  const uint64_t call = call_.load();
  const bool waits_outside_calls = call == 0 && bridge_.waits_outside_calls();
  const auto needs_more_than = [&](uint64_t completed) {
    return waits_outside_calls || call > completed;
  };
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, dead] : dead_) {
    if (needs_more_than(dead.completed)) return lost(dead.name + " has died", "restart the job");
  }
  for (const auto& [peer, heard] : heard_) {
    if (!heard.silence.is_too_long()) continue;
    // What its host has sent before may have been lost on the way.
    const std::vector<int>& its_host = hosts_.ranks_of(hosts_.place_of(peer).host);
    if (!needs_more_than(heard.completed) && !engine_.awaits_any(its_host)) continue;
    return lost(join(hosts_.describe(peer), ' ', heard.silence.to_string()), kVanished);
  }
  return std::nullopt;
}

std::map<int, std::string> HostMonitor::ended_ranks() {
  std::map<int, std::string> ended;
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, dead] : dead_) ended.emplace(peer, dead.name + " has died");
  for (const auto& [peer, heard] : heard_) {
    if (!heard.silence.is_too_long()) continue;
    ended.emplace(peer, join(hosts_.describe(peer), ' ', heard.silence.to_string()));
  }
  return ended;
}

Error HostMonitor::lost(std::string_view what, std::string_view advice) const {
  const std::optional<Engine::Awaited> awaited = engine_.awaited();
  const std::string place = awaited ? awaited->phase : join("call ", call_.load());
  return Error(ErrorKind::kPeerFailed, prefix(), join(what, " (", place, "); ", advice));
}

std::optional<Error> HostMonitor::find_overdue() const {
  const Inbox::PlaceRef place = bridge_.inbox().overdue();
  if (!place) return std::nullopt;
  const auto timeout = std::chrono::duration_cast<milliseconds>(bridge_.local().timeout());
  return Error(ErrorKind::kTimeout,
               join(bridge_.prefix("recv"), " waited ", timeout.count(), " ms for ",
                    place->source == kAnyRank ? "any other rank" : hosts_.describe(place->source),
                    " (tag ", place->tag, "), the timeout of this call; has it called send?"));
}

std::string HostMonitor::prefix() const {
  return join("rota: rank ", bridge_.rank(), '/', hosts_.world_size());
}

void HostMonitor::warn_about_stall() {
  const std::optional<Engine::Awaited> awaited = engine_.awaited();
  if (!awaited || awaited->since == warned_of_) return;
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - awaited->since);
  if (waited < kStallAfter) return;
  warned_of_ = awaited->since;
  std::cerr << join(prefix(), " has waited ", waited.count(), " ms for ",
                    hosts_.describe(awaited->peer), " (", awaited->phase, "); still waiting\n");
}

}  // namespace rota::hosts
