#include "tensor/hosts/engine.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace rota::tensors {
namespace {

// Longer than any job; what waits without a timeout is ended by abort().
constexpr auto kForever = std::chrono::hours(24 * 365);

// "Connection reset by peer" of Gloo's "[file:line] Read error [address]: Connection reset by peer.
// This is typically caused by ...".
std::string cause_of(const std::exception& failure) {
  const std::string text = failure.what();
  const std::string cause = text.substr(0, text.find(". This is"));
  const size_t begin = cause.rfind("] ");
  return begin == std::string::npos ? cause : cause.substr(begin + 2);
}

std::vector<at::Tensor> bytes_of(const void* data, size_t num_bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(num_bytes)}, at::kByte)};
}

}  // namespace

template <typename Start>
Engine::Transfer Engine::start(const Start& start, int peer, bool is_send) {
  try {
    return {start(), peer, is_send};
  } catch (const std::exception& failure) {
    throw Error(ErrorKind::kPeerFailed, "rota",
                join("the connection to ", describe_(peer), " is broken (", cause_of(failure),
                     "); restart the job"));
  }
}

Engine::Transfer Engine::send(const void* data, size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return {};
  std::vector<at::Tensor> tensors = bytes_of(data, num_bytes);
  return start([&] { return backend_for(tag).send(tensors, peer, tag); }, peer, true);
}

Engine::Transfer Engine::recv(void* data, size_t num_bytes, int peer, int tag) {
  if (num_bytes == 0) return {};
  std::vector<at::Tensor> tensors = bytes_of(data, num_bytes);
  return start([&] { return backend_for(tag).recv(tensors, peer, tag); }, peer, false);
}

Engine::Transfer Engine::recv_letter(void* data, size_t num_bytes) {
  std::vector<at::Tensor> tensors = bytes_of(data, num_bytes);
  return start([&] { return letters_->recvAnysource(tensors, kLetterTag); }, -1, false);
}

bool Engine::wait_for(const c10::intrusive_ptr<::c10d::Work>& work, std::optional<Awaited> awaited,
                      std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (cause_) throw *cause_;
    waiting_.push_back({work, std::move(awaited)});
  }
  bool is_done = false;
  std::exception_ptr failure;
  try {
    is_done = work->wait(timeout);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.work == work; });
  if (cause_) throw *cause_;
  if (failure) std::rethrow_exception(failure);
  return is_done;
}

void Engine::wait(Transfer& transfer, std::chrono::milliseconds timeout, std::string_view prefix,
                  std::string_view phase) {
  const auto work = std::exchange(transfer.work_, nullptr);
  if (!work) return;
  const int peer = transfer.peer_;
  const auto start = Clock::now();
  try {
    wait_for(work, Awaited{peer, std::string(phase), start}, timeout);
  } catch (const Error& error) {  // what abort() was given
    if (!error.has_cause()) throw;
    throw Error(error.kind(), std::string(prefix), error.told());
  } catch (const std::exception& failure) {
    if (Clock::now() - start >= timeout) {
      throw Error(ErrorKind::kTimeout,
                  join(prefix, " waited ", timeout.count(), " ms for ", describe_(peer), " (",
                       phase, "), the timeout of this call; is it alive?"));
    }
    throw Error(ErrorKind::kPeerFailed, std::string(prefix),
                join(describe_(peer), " has died or left, or the network is down (", phase, "; ",
                     cause_of(failure), "); restart the job"));
  }
}

std::optional<int> Engine::wait_any(Transfer& transfer) {
  const auto work = std::exchange(transfer.work_, nullptr);
  try {
    if (!wait_for(work, std::nullopt, kForever)) return std::nullopt;
    return work->sourceRank();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void Engine::abort(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!cause_) cause_ = cause;
  for (const Waiting& waiting : waiting_) {
    try {
      waiting.work->abort();
    } catch (const std::exception&) {  // not every backend can; its own timeout ends the wait
    }
  }
}

void Engine::flush(Transfer& transfer, std::chrono::milliseconds timeout) {
  const auto work = std::exchange(transfer.work_, nullptr);
  if (!work) return;
  try {
    work->wait(timeout);
  } catch (const std::exception&) {
  }
}

std::optional<Engine::Awaited> Engine::awaited() const {
  const std::lock_guard lock(mutex_);
  for (const Waiting& waiting : waiting_) {
    if (waiting.awaited) return waiting.awaited;
  }
  return std::nullopt;
}

}  // namespace rota::tensors
