// One rank's part of one pipelined collective: where the slots of a round are, and how to say or
// await that a round is filled or drained. Executors are written in these verbs.
//
// Rounds are numbered through the whole life of a communicator, so that flags only grow; an
// executor counts from 0 and adds first_round here. Slot r % 2 belongs to round r.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/limits.h"
#include "base/waiter.h"
#include "schedule/direct.h"
#include "transport/transport.h"

namespace rota::cpu {

// Told whom a wait is for, so that errors can name the peer.
class PeerWaitObserver : public WaitObserver {
 public:
  virtual void begin_wait(int peer, std::string_view phase, uint64_t step) = 0;
};

// What a rank has for its peers, where it is not sent through slots but read in its heap.
struct Source {
  enum class Kind : uint8_t {
    kSlots,    // this call goes through slots
    kNothing,  // of this rank, peers read nothing
    kTensor,
  };
  Kind kind = Kind::kSlots;
  const void* tensor = nullptr;
};

// Every rank's, by rank, where peers read it. Not const, because places of slots are not.
using Sources = std::array<std::byte*, kMaxWorldSize>;

// Where the messages of a one-round collective lie; the flag of a message is the post of its epoch.
class Mailboxes {
 public:
  Mailboxes(const transport::Transport& transport, uint64_t epoch, size_t num_bytes)
      : transport_(transport), offset_(transport.geometry().message(epoch, num_bytes)) {}

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  std::byte* own() const { return of(rank()); }
  std::byte* of(int peer) const { return transport_.region(peer).at(offset_); }

 private:
  const transport::Transport& transport_;
  size_t offset_;  // the same in every region
};

class Exchange {
 public:
  Exchange(const transport::Transport& transport, Waiter& waiter, const WaitPolicy& policy,
           PeerWaitObserver& observer, uint64_t first_round)
      : transport_(transport),
        waiter_(waiter),
        policy_(policy),
        observer_(observer),
        first_round_(first_round) {}

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  size_t slot_bytes() const { return transport_.geometry().slot_bytes; }

  std::byte* own_slot(uint64_t round) const { return slot(rank(), round); }
  std::byte* slot(int peer, uint64_t round) const {
    return transport_.region(peer).slot(first_round_ + round);
  }

  // The own slot of `round` may be read from now on.
  void publish_filled(uint64_t round) {
    waiter_.publish(transport_.own_control().filled, first_round_ + round + 1);
  }
  // This rank has read what it reads of others' slots of `round`; in two_shot, it has put the sums
  // there.
  void publish_drained(uint64_t round) {
    waiter_.publish(transport_.own_control().drained, first_round_ + round + 1);
  }

  void wait_filled(int peer, uint64_t round, std::string_view phase) {
    wait(transport_.region(peer).control().filled, round, peer, phase);
  }
  void wait_drained(int peer, uint64_t round, std::string_view phase) {
    wait(transport_.region(peer).control().drained, round, peer, phase);
  }
  void wait_filled_by_peers(uint64_t round, std::string_view phase) {
    for (int i = 0; i < world_size() - 1; ++i) {
      wait_filled(schedule::rotated_peer(rank(), world_size(), i), round, phase);
    }
  }
  void wait_drained_by_peers(uint64_t round, std::string_view phase) {
    for (int i = 0; i < world_size() - 1; ++i) {
      wait_drained(schedule::rotated_peer(rank(), world_size(), i), round, phase);
    }
  }

 private:
  void wait(const Flag& flag, uint64_t round, int peer, std::string_view phase) {
    const uint64_t target = first_round_ + round + 1;
    if (flag.load() >= target) return;
    observer_.begin_wait(peer, phase, round);
    waiter_.wait(flag, target, policy_, observer_);
  }

  const transport::Transport& transport_;
  Waiter& waiter_;
  const WaitPolicy& policy_;
  PeerWaitObserver& observer_;
  uint64_t first_round_;
};

}  // namespace rota::cpu
