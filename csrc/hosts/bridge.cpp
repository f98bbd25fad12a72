#include "hosts/bridge.h"

#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace rota::hosts {
namespace {

// A host that waits in vain for one of its own ranks fails first, and so all others name that rank
// instead of its host's leader; likewise a leader, before the ranks that wait for its verdict.
constexpr std::chrono::milliseconds kPatienceWithHosts{500};
constexpr std::chrono::milliseconds kPatienceWithLeader{1000};

// Every mismatch ends with it, once.
constexpr std::string_view kNothingWritten = "; nothing was written";

// Runs a collective of this host's ranks, whose errors name the whole that it is a part of.
template <typename Run>
void run_part_of(std::string_view kind_name, const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    const std::string_view what = error.what();
    const size_t end = what.find(':');
    if (!what.starts_with("rota.") || end == what.npos) throw;
    const std::string text = join("rota.", kind_name, what.substr(end));
    if (!error.has_cause()) throw Error(error.kind(), text);
    const std::string cause = error.told();
    throw Error(error.kind(), text.substr(0, text.size() - cause.size() - 2), cause);
  }
}

}  // namespace

Bridge::Bridge(schedule::Hosts hosts, int rank, std::shared_ptr<Communicator> local,
               ConnectionsPtr data, ConnectionsPtr letters)
    : hosts_(std::move(hosts)),
      rank_(rank),
      local_(std::move(local)),
      engine_(std::move(data), std::move(letters), hosts_),
      partnered_(hosts_.whose_partner_is(rank)),
      messages_(is_leader() ? static_cast<size_t>(hosts_.num_hosts()) : 0),
      monitor_(*this) {}

Bridge::~Bridge() = default;

void Bridge::begin(const Call& call, std::optional<Nanoseconds> own_timeout) {
  check_usable(call.kind_name());
  ++epoch_;
  kind_name_ = call.kind_name();
  own_timeout_ = own_timeout;
  monitor_.begin_call(epoch_);
}

// The ranks of a host agree first, so their leader greets the other hosts for all of them. Messages
// of data follow only once all hosts have agreed, so they have the length that their receivers
// expect.
void Bridge::agree(const Call& call, const ShortSum* short_sum) {
  if (const auto loss = monitor_.find_loss()) {
    throw Error(loss->kind(), prefix(kind_name_), loss->told());
  }
  std::optional<Error> disagreement;
  try {
    local_->agree(call, CallerThread::kProgress, own_timeout_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch) throw;
    disagreement = error;
  }
  std::string text;
  verdict_.mismatch_bytes = 0;
  if (is_leader()) {
    greet(call, disagreement, short_sum);
    if (!all_called(call)) {
      text = mismatch(call).what();
      verdict_.mismatch_bytes = text.size();
    } else if (short_sum != nullptr) {
      short_sum->sum();
    }
  } else if (short_sum != nullptr && !disagreement) {
    short_sum->contribute();
  }
  if (disagreement) throw *disagreement;
  const size_t result_bytes = short_sum == nullptr ? 0 : short_sum->result_bytes;
  share(&verdict_, offsetof(Verdict, short_result) + result_bytes);
  if (verdict_.mismatch_bytes == 0) return;
  text.resize(verdict_.mismatch_bytes);
  share(text.data(), text.size());
  throw Error(ErrorKind::kMismatch, text);
}

// A contribution may be shorter than the memory that waits for it.
void Bridge::greet(const Call& call, const std::optional<Error>& disagreement,
                   const ShortSum* short_sum) {
  static_assert(std::is_trivially_copyable_v<Greeting>);
  Message& own = messages_[static_cast<size_t>(host())];
  auto& greeting = *new (own.bytes) Greeting{.epoch = epoch_, .words = call.to_words()};
  size_t num_bytes = sizeof(Greeting);
  std::vector<Engine::Transfer> transfers;
  for (int other = 0; other < hosts_.num_hosts(); ++other) {
    if (other == host()) continue;
    transfers.push_back(recv(messages_[static_cast<size_t>(other)].bytes, sizeof(Message),
                             hosts_.rank_at(other, 0), kGreetingTag));
  }
  if (disagreement) {
    std::strncpy(greeting.disagreement.data(), disagreement->what(),
                 greeting.disagreement.size() - 1);
  } else if (short_sum != nullptr) {
    const std::span<const std::byte> contribution = short_sum->contribute();
    if (!contribution.empty()) {
      std::memcpy(own.bytes + num_bytes, contribution.data(), contribution.size());
    }
    num_bytes += contribution.size();
  }
  for (int other = 0; other < hosts_.num_hosts(); ++other) {
    if (other == host()) continue;
    transfers.push_back(send(own.bytes, num_bytes, hosts_.rank_at(other, 0), kGreetingTag));
  }
  wait(transfers, "start", kPatienceWithHosts);
}

bool Bridge::all_called(const Call& call) const {
  const Call::Words words = call.to_words();
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    const Greeting& greeting = greeting_of(host);
    if (greeting.words != words || greeting.epoch != epoch_ || greeting.disagreement[0] != 0) {
      return false;
    }
  }
  return true;
}

void Bridge::share(void* data, size_t num_bytes) {
  if (local_size() == 1) return;
  run_part_of(kind_name_, [&] {
    local_->run({.kind = CollectiveKind::kBroadcast, .num_elems = num_bytes}, {.data = data},
                CallerThread::kProgress,
                own_timeout_.value_or(local_->timeout()) + kPatienceWithLeader);
  });
}

Error Bridge::mismatch(const Call& call) const {
  std::string all_calls;
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    const Greeting& greeting = greeting_of(host);
    all_calls += join(host > 0 ? "; " : "", "host ", host, " (ranks");
    for (const int rank : hosts_.ranks_of(host)) all_calls += join(' ', rank);
    std::string_view text(greeting.disagreement.data(),
                          strnlen(greeting.disagreement.data(), greeting.disagreement.size()));
    text = text.substr(0, text.find(kNothingWritten));
    if (text.empty()) {
      all_calls += join(") called ", Call::from_words(greeting.words).to_string());
      if (greeting.epoch != epoch_) all_calls += join(" as call ", greeting.epoch);
    } else {
      all_calls += join("): ", text);
    }
  }
  return Error(ErrorKind::kMismatch,
               join("rota.", call.kind_name(), ": ranks disagree (call ", epoch_, "): ", all_calls,
                    kNothingWritten, ": make all ranks call the same collective"));
}

void Bridge::wait(Engine::Transfer& transfer, std::string_view phase, Nanoseconds patience) {
  const auto timeout = own_timeout_.value_or(local_->timeout()) + patience;
  engine_.wait(transfer, std::chrono::duration_cast<std::chrono::milliseconds>(timeout),
               prefix(kind_name_), join("call ", epoch_, ", ", phase));
}

void Bridge::wait(std::vector<Engine::Transfer>& transfers, std::string_view phase,
                  Nanoseconds patience) {
  for (Engine::Transfer& transfer : transfers) wait(transfer, phase, patience);
  transfers.clear();
}

void Bridge::wait_outside(Engine::Transfer& transfer, std::string_view call) {
  try {
    engine_.wait(transfer, timeout(), prefix(call), "message");
  } catch (const Error& error) {
    fail(error);
    throw;
  }
}

void Bridge::run_local(const Call& call, const cpu::Buffers& buffers) {
  run_part_of(kind_name_,
              [&] { local_->run(call, buffers, CallerThread::kProgress, own_timeout_); });
}

void Bridge::fail(const Error& error) {
  local_->fail(error);
  end_waits(error);
}

// Peers see a rank that has failed.
void Bridge::abort(const std::string& reason) {
  local_->abort(reason);
  end_waits(Error(ErrorKind::kPeerFailed, reason));
}

// What the hook ends may wait for anybody.
bool Bridge::waits_outside_calls() {
  if (engine_.awaited() || inbox_.is_awaited()) return true;
  const std::lock_guard lock(hook_mutex_);
  return failure_hook_ != nullptr;
}

void Bridge::end_waits(const Error& error) {
  engine_.abort(error);
  inbox_.fail(error);
  monitor_.post_failure(error);
  const std::lock_guard lock(failure_mutex_);
  has_failed_ = true;
  failed_.notify_all();
}

void Bridge::on_failure(std::function<void()> hook) {
  const std::lock_guard lock(hook_mutex_);
  failure_hook_ = std::move(hook);
}

void Bridge::run_failure_hook() {
  const std::lock_guard lock(hook_mutex_);
  if (failure_hook_) failure_hook_();
}

void Bridge::await_failure(std::chrono::milliseconds timeout) {
  std::unique_lock lock(failure_mutex_);
  failed_.wait_for(lock, timeout, [this] { return has_failed_; });
}

std::string Bridge::prefix(std::string_view call) const {
  return join("rota.", call, ": rank ", rank_, '/', world_size());
}

}  // namespace rota::hosts
