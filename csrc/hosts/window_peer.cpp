#include "hosts/window_peer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace rota::hosts {
namespace {

using std::chrono::milliseconds;

// How long a rank that owes nothing may be silent before it is asked for a sign of life.
constexpr milliseconds kAskAfter{300};
// Packets get longer where answers take less than the first, and shorter where they take more than
// the second; four of the longest take 17 ms at 1 Gbit/s.
constexpr milliseconds kQuickAnswer{30};
constexpr milliseconds kLateAnswer{120};

std::string broken(const std::exception& error) {
  return join("has died or left, or the network to its host is down (", error.what(), ')');
}

void refuse(PacketBuffer& answer, const RemoteFailure& failure) {
  WindowPacket& header = answer.header();
  header.kind = WindowPacket::Kind::kFailed;
  header.error = failure.kind;
  header.data_bytes = std::min(failure.text.size(), kPacketDataBytes);
  std::memcpy(answer.data(), failure.text.data(), header.data_bytes);
}

}  // namespace

WindowPeer::WindowPeer(Connections& connections, int rank, int tag, std::string name, Serve serve)
    : connections_(connections),
      rank_(rank),
      tag_(tag),
      name_(std::move(name)),
      serve_(std::move(serve)),
      waiter_(&sleeping_, {}),
      publisher_(nullptr, {&sleeping_}) {
  busy_.header() = {.kind = WindowPacket::Kind::kBusy};
  busy_bytes_ = busy_.seal();
  *thread_ = std::thread([this] { run(); });
}

WindowPeer::~WindowPeer() {
  if (thread_.is_of_parent()) return;
  {
    const std::lock_guard lock(mutex_);
    lose("is no longer connected: this rank has left");
    is_ending_ = true;
  }
  thread_->join();
}

// ---- the side that asks

void WindowPeer::send(WindowPacket packet, const std::function<void(std::byte*)>& write_data,
                      std::span<std::byte> result, Call* call) {
  packet.number = ++num_asked_;
  Asked& asked = asked_[packet.number % kMaxAsked];
  // It was answered, so it has been sent.
  if (const MessageRef sent = std::exchange(asked.sent, nullptr)) sent->wait(kForever);
  asked.buffer.header() = packet;
  if (write_data) write_data(asked.buffer.data());
  asked.call = call;
  asked.result = result;
  asked.since = Clock::now();
  asked.sent = connections_.send(asked.buffer.message(), asked.buffer.seal(), rank_, tag_);
}

size_t WindowPeer::Call::packet_bytes() const {
  const std::lock_guard lock(peer_.mutex_);
  return peer_.packet_bytes_;
}

void WindowPeer::fit_packets(uint64_t number, Clock::duration passed) {
  if (number <= num_asked_of_other_length_) return;
  size_t fitting = packet_bytes_;
  if (passed < kQuickAnswer) fitting = std::min(2 * fitting, kPacketDataBytes);
  if (passed > kLateAnswer) fitting = std::max(fitting / 2, kLeastPacketDataBytes);
  if (fitting == packet_bytes_) return;
  packet_bytes_ = fitting;
  num_asked_of_other_length_ = num_asked_;
}

void WindowPeer::send_or_lose(const WindowPacket& packet) {
  try {
    send(packet, nullptr, {}, nullptr);
  } catch (const std::exception& error) {
    lose(broken(error));
  }
}

void WindowPeer::try_ask(const WindowPacket& packet) {
  const std::lock_guard lock(mutex_);
  if (!loss_ && has_room()) send_or_lose(packet);
}

bool WindowPeer::is_quiet() {
  const std::lock_guard lock(mutex_);
  return loss_ || num_asked_ == num_answered_.load();
}

bool WindowPeer::is_lost() {
  const std::lock_guard lock(mutex_);
  return loss_.has_value();
}

WindowPeer::Call::~Call() {
  const std::lock_guard lock(peer_.mutex_);
  for (Asked& asked : peer_.asked_) {
    if (asked.call == this) asked.call = nullptr;
  }
}

void WindowPeer::Call::throw_failure() {
  if (failure_) throw *failure_;
  if (peer_.loss_) throw RemoteFailure{ErrorKind::kPeerFailed, peer_.name_ + ' ' + *peer_.loss_};
}

void WindowPeer::Call::ask(WindowPacket packet, const std::function<void(std::byte*)>& write_data,
                           std::span<std::byte> result) {
  while (true) {
    uint64_t awaited;
    {
      const std::lock_guard lock(peer_.mutex_);
      throw_failure();
      if (peer_.has_room()) {
        try {
          peer_.send(packet, write_data, result, this);
        } catch (const std::exception& error) {
          peer_.lose(broken(error));
          throw_failure();
        }
        last_ = peer_.num_asked_;
        return;
      }
      awaited = peer_.num_asked_ - kMaxAsked + 1;
    }
    peer_.waiter_.wait(peer_.num_answered_, awaited, WaitPolicy{}, observer_);
  }
}

void WindowPeer::Call::finish() {
  peer_.waiter_.wait(peer_.num_answered_, last_, WaitPolicy{}, observer_);
  const std::lock_guard lock(peer_.mutex_);
  if (failure_) throw *failure_;
}

// ---- whether it lives

void WindowPeer::lose(const std::string& why) {
  if (!loss_) loss_ = why;
  if (awaited_) awaited_->abort();
}

std::optional<std::string> WindowPeer::loss() {
  const std::lock_guard lock(mutex_);
  if (loss_) return loss_;
  const uint64_t num_heard = num_heard_.load();
  if (std::exchange(num_heard_then_, num_heard) == num_heard) {
    silence_.look();
  } else {
    silence_.end();
  }
  if (silence_.is_too_long()) {
    lose(join(silence_.to_string(), "; ", kVanished));
  } else if (silence_.is_longer_than(kAskAfter) && num_asked_ == num_answered_.load()) {
    send_or_lose({.kind = WindowPacket::Kind::kPing});
  }
  return loss_;
}

// ---- the thread

void WindowPeer::run() {
  pthread_setname_np(pthread_self(), "rota-window");
  try {
    for (size_t i = 0; i < kNumPosted; ++i) {
      posted_[i] = connections_.recv(received_[i].message(), PacketBuffer::kNumBytes, rank_, tag_);
    }
    for (size_t i = 0; await_packet(i); i = (i + 1) % kNumPosted) {
      take(received_[i]);
      posted_[i] = connections_.recv(received_[i].message(), PacketBuffer::kNumBytes, rank_, tag_);
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    lose(broken(error));
  }
}

bool WindowPeer::await_packet(size_t posted) {
  {
    const std::lock_guard lock(mutex_);
    if (is_ending_ || loss_) return false;
    awaited_ = posted_[posted];
  }
  std::exception_ptr failure;
  bool is_there = false;
  try {
    is_there = posted_[posted]->wait(kForever);
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    awaited_ = nullptr;
    if (is_ending_ || loss_) return false;
  }
  if (failure) std::rethrow_exception(failure);
  if (is_there) num_heard_.publish(num_heard_.load() + 1);
  return is_there;
}

void WindowPeer::take(PacketBuffer& packet) {
  if (!packet.is_sealed()) throw std::runtime_error("it sent what is no packet of a window");
  const WindowPacket& header = packet.header();
  if (header.is_request()) {
    serve(packet);
  } else if (header.kind != WindowPacket::Kind::kBusy) {
    take_answer(packet);
  }
}

void WindowPeer::take_answer(PacketBuffer& packet) {
  const WindowPacket& header = packet.header();
  const uint64_t number = num_answered_.load() + 1;
  {
    const std::lock_guard lock(mutex_);
    if (header.number != number || number > num_asked_) {
      throw std::runtime_error("it sent an answer that nobody awaits");
    }
    Asked& asked = asked_[number % kMaxAsked];
    fit_packets(number, Clock::now() - asked.since);
    if (Call* const call = std::exchange(asked.call, nullptr)) {
      if (header.kind == WindowPacket::Kind::kFailed) {
        const auto* text = reinterpret_cast<const char*>(packet.data());
        if (!call->failure_) call->failure_ = {header.error, {text, header.data_bytes}};
      } else if (header.data_bytes != asked.result.size()) {
        throw std::runtime_error("it sent an answer of another length");
      } else if (!asked.result.empty()) {
        std::memcpy(asked.result.data(), packet.data(), header.data_bytes);
      }
    }
  }
  publisher_.publish(num_answered_, number);
}

void WindowPeer::serve(PacketBuffer& packet) {
  const WindowPacket& header = packet.header();
  if (header.number != num_served_ + 1) throw std::runtime_error("it sent requests out of order");
  num_served_ = header.number;
  Answer& answer = answers_[header.number % kMaxAsked];
  if (const MessageRef sent = std::exchange(answer.sent, nullptr)) sent->wait(kForever);
  for (const MessageRef& sent : std::exchange(answer.sent_busy, {})) sent->wait(kForever);
  WindowPacket& reply = answer.buffer.header();
  reply = {.kind = WindowPacket::Kind::kDone, .number = header.number};
  Request request{*this, header, {packet.data(), header.data_bytes}, answer.buffer.data()};
  try {
    reply.data_bytes = serve_(request);
  } catch (const RemoteFailure& failure) {
    refuse(answer.buffer, failure);
  } catch (const std::exception& error) {  // no memory
    refuse(answer.buffer, {ErrorKind::kTransport, error.what()});
  }
  answer.sent = connections_.send(answer.buffer.message(), answer.buffer.seal(), rank_, tag_);
}

void WindowPeer::send_busy() {
  answers_[num_served_ % kMaxAsked].sent_busy.push_back(
      connections_.send(busy_.message(), busy_bytes_, rank_, tag_));
}

}  // namespace rota::hosts
