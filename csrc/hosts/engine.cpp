#include "hosts/engine.h"

#include <algorithm>
#include <utility>

namespace rota::hosts {

template <typename Start>
Engine::Transfer Engine::start(const Start& start, int peer) {
  try {
    return {start(), peer};
  } catch (const std::exception& failure) {
    throw Error(ErrorKind::kPeerFailed, "rota",
                join("the connection to ", hosts_.describe(peer), " is broken (", failure.what(),
                     "); restart the job"));
  }
}

Engine::Transfer Engine::send(const void* data, size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return {};
  return start([&] { return connections_for(tag).send(data, num_bytes, peer, tag); }, peer);
}

Engine::Transfer Engine::recv(void* data, size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return {};
  return start([&] { return connections_for(tag).recv(data, num_bytes, peer, tag); }, peer);
}

Engine::Transfer Engine::recv_letter(void* data, size_t num_bytes) {
  return start([&] { return letters_->recv_from_any(data, num_bytes, kLetterTag); }, -1);
}

bool Engine::wait_for(const MessageRef& message, std::optional<Awaited> awaited,
                      std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (cause_) throw *cause_;
    waiting_.push_back({message, std::move(awaited)});
  }
  bool is_done = false;
  std::exception_ptr failure;
  try {
    is_done = message->wait(timeout);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.message == message; });
  if (cause_) throw *cause_;
  if (failure) std::rethrow_exception(failure);
  return is_done;
}

void Engine::wait(Transfer& transfer, std::chrono::milliseconds timeout, std::string_view prefix,
                  std::string_view phase) {
  const MessageRef message = std::exchange(transfer.message_, nullptr);
  if (!message) return;
  const int peer = transfer.peer_;
  const auto start = Clock::now();
  try {
    wait_for(message, Awaited{peer, std::string(phase), start}, timeout);
  } catch (const Error& error) {  // what abort() was given
    if (!error.has_cause()) throw;
    throw Error(error.kind(), std::string(prefix), error.told());
  } catch (const std::exception& failure) {
    if (Clock::now() - start >= timeout) {
      throw Error(ErrorKind::kTimeout,
                  join(prefix, " waited ", timeout.count(), " ms for ", hosts_.describe(peer), " (",
                       phase, "), the timeout of this call; is it alive?"));
    }
    throw Error(ErrorKind::kPeerFailed, std::string(prefix),
                join(hosts_.describe(peer), " has died or left, or the network is down (", phase,
                     "; ", failure.what(), "); restart the job"));
  }
}

std::optional<int> Engine::wait_any(Transfer& transfer) {
  const MessageRef message = std::exchange(transfer.message_, nullptr);
  try {
    if (!wait_for(message, std::nullopt, kForever)) return std::nullopt;
    return message->source();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void Engine::abort(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!cause_) cause_ = cause;
  for (const Waiting& waiting : waiting_) waiting.message->abort();
}

void Engine::flush(Transfer& transfer, std::chrono::milliseconds timeout) {
  const MessageRef message = std::exchange(transfer.message_, nullptr);
  if (!message) return;
  try {
    message->wait(timeout);
  } catch (const std::exception&) {
  }
}

bool Engine::awaits_any(const std::vector<int>& peers) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(waiting_, [&](const Waiting& waiting) {
    return waiting.awaited && std::ranges::count(peers, waiting.awaited->peer) > 0;
  });
}

std::optional<Engine::Awaited> Engine::awaited() const {
  const std::lock_guard lock(mutex_);
  for (const Waiting& waiting : waiting_) {
    if (waiting.awaited) return waiting.awaited;
  }
  return std::nullopt;
}

}  // namespace rota::hosts
