#include "memory_network.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace rota::test {

struct MemoryNetwork::End {
  enum class State { kPending, kDone, kGivenUp };
  static constexpr int kAnyRank = -1;

  const bool is_send;
  std::byte* data;
  size_t num_bytes;
  const int rank;
  int peer;  // of a recv: kAnyRank, or the sender; the sender once it is done
  const int tag;

  std::mutex mutex{};
  std::condition_variable changed{};
  // Guarded by it.
  State state = State::kPending;
  std::vector<std::byte> bytes{};  // of a send that is copied at once
};

// The caller's, whose memory nobody touches once it is gone.
class MemoryNetwork::Handle final : public hosts::Connections::Message {
 public:
  explicit Handle(EndRef end) : end_(std::move(end)) {}
  ~Handle() override { abort(); }

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(end_->mutex);
    const auto has_ended = [&] { return end_->state != End::State::kPending; };
    // Longer than any test, and not so long that the clock's numbers overflow.
    const auto patience = std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(1));
    if (!end_->changed.wait_for(lock, patience, has_ended)) {
      end_->state = End::State::kGivenUp;
      throw std::runtime_error("timed out");
    }
    if (end_->state == End::State::kGivenUp) throw std::runtime_error("given up");
    return true;
  }
  void abort() override {
    const std::lock_guard lock(end_->mutex);
    if (end_->state == End::State::kPending) end_->state = End::State::kGivenUp;
    end_->changed.notify_all();
  }
  int source() const override { return end_->peer; }

 private:
  EndRef end_;
};

class MemoryNetwork::RankConnections final : public hosts::Connections {
 public:
  RankConnections(MemoryNetwork& network, int rank) : network_(network), rank_(rank) {}

  MessageRef send(const void* data, size_t num_bytes, int peer, int tag) override {
    return start(true, const_cast<void*>(data), num_bytes, peer, tag);
  }
  MessageRef recv(void* data, size_t num_bytes, int peer, int tag) override {
    return start(false, data, num_bytes, peer, tag);
  }
  MessageRef recv_from_any(void* data, size_t num_bytes, int tag) override {
    return start(false, data, num_bytes, End::kAnyRank, tag);
  }

 private:
  MessageRef start(bool is_send, void* data, size_t num_bytes, int peer, int tag) {
    auto* bytes = static_cast<std::byte*>(data);
    return network_.start(EndRef(new End{is_send, bytes, num_bytes, rank_, peer, tag}));
  }

  MemoryNetwork& network_;
  int rank_;
};

MemoryNetwork::MemoryNetwork(Kind kind) : kind_(kind), thread_([this] { run(); }) {}

MemoryNetwork::~MemoryNetwork() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

hosts::ConnectionsPtr MemoryNetwork::connect(int rank) {
  return std::make_shared<RankConnections>(*this, rank);
}

void MemoryNetwork::cut_off(int rank) {
  const std::lock_guard lock(mutex_);
  cut_off_ = rank;
}

bool MemoryNetwork::is_cut_off(const End& end) const {
  return cut_off_ == end.rank || (end.is_send && cut_off_ == end.peer);
}

hosts::Connections::MessageRef MemoryNetwork::start(EndRef end) {
  if (end->is_send && kind_ == Kind::kLetters) {
    end->bytes.assign(end->data, end->data + end->num_bytes);
    end->data = end->bytes.data();
    end->state = End::State::kDone;
  }
  auto handle = std::make_shared<Handle>(end);
  const int receiver = end->is_send ? end->peer : end->rank;
  const int tag = end->tag;
  const std::lock_guard lock(mutex_);
  if (is_cut_off(*end)) return handle;
  (end->is_send ? sends_ : recvs_)[{receiver, tag}].push_back(std::move(end));
  match(receiver, tag);
  return handle;
}

// Each recv with the first send that it may take.
void MemoryNetwork::match(int receiver, int tag) {
  Ends& sends = sends_[{receiver, tag}];
  Ends& recvs = recvs_[{receiver, tag}];
  for (auto recv = recvs.begin(); recv != recvs.end();) {
    const auto send = std::ranges::find_if(sends, [&](const EndRef& one) {
      return (*recv)->peer == End::kAnyRank || (*recv)->peer == one->rank;
    });
    if (send == sends.end()) {
      ++recv;
      continue;
    }
    carried_.emplace_back(*send, *recv);
    sends.erase(send);
    recv = recvs.erase(recv);
  }
  changed_.notify_all();
}

void MemoryNetwork::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !carried_.empty(); });
    if (is_ending_) return;
    const auto [send, recv] = std::move(carried_.front());
    carried_.pop_front();
    lock.unlock();
    constexpr std::chrono::microseconds kOnItsWay{100};
    std::this_thread::sleep_for(kOnItsWay);
    carry(*send, *recv);
    lock.lock();
  }
}

void MemoryNetwork::carry(End& send, End& recv) {
  const std::scoped_lock lock(send.mutex, recv.mutex);
  if (send.state == End::State::kGivenUp || recv.state != End::State::kPending) return;
  if (send.num_bytes > 0)
    std::memcpy(recv.data, send.data, std::min(send.num_bytes, recv.num_bytes));
  recv.peer = send.rank;
  for (End* end : {&send, &recv}) {
    end->state = End::State::kDone;
    end->changed.notify_all();
  }
}

}  // namespace rota::test
