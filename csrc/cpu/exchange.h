// One rank's part of a pipelined collective: locates the slots of a round, and publishes or awaits
// that a round is filled or drained. Executors are written in these verbs.
//
// Rounds are numbered over the communicator's whole life, so that flags only grow; an executor
// counts from 0 and Exchange adds first_round. A call starts with all slots free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "base/waiter.h"
#include "cpu/slot_stores.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "transport/transport.h"

namespace rota::cpu {

// Places change hands where two ranks write for each other: in every other use, each writes in the
// other's region, where it has read last. Then the lines that it writes are in its own caches, and
// in no other's, so neither has to take them back from the other (csrc/README.md). A few places
// that stay in the caches are best then; elsewhere a writer does better with many.

// Locates the messages of a one-round collective. A message's flag is the post of its epoch.
class Mailboxes {
 public:
  // are_reserved: by every rank, so that others may write there.
  Mailboxes(const transport::Transport& transport, SlotWriter& writer, uint64_t epoch,
            size_t num_bytes, bool are_reserved)
      : transport_(transport),
        writer_(writer),
        num_bytes_(num_bytes),
        change_hands_(transport.world_size() == 2),
        are_swapped_(change_hands_ && are_reserved && epoch / 2 % 2 == 1),
        offset_(transport.geometry().message(change_hands_ ? epoch % 2 : epoch, num_bytes)) {}

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  size_t num_bytes() const { return num_bytes_; }
  std::byte* own() const { return of(rank()); }
  std::byte* of(int peer) const {
    return transport_.region(are_swapped_ ? 1 - peer : peer).at(offset_);
  }
  // Where a message that holds one part for each other rank, each of at most max_bytes, has that
  // for `receiver`. With two ranks both parts are at the beginning, so that they change hands too.
  std::byte* part(int sender, int receiver, uint64_t max_bytes) const {
    const int index = schedule::index_of_peer(sender, world_size(), receiver);
    return of(sender) + static_cast<uint64_t>(index) * max_bytes;
  }
  // Stores into the own message, for one other rank that reads it, and for all.
  SlotStores& stores_to(int reader) const { return writer_.to(reader); }
  SlotStores& stores_to_all() const { return writer_.to_all(); }
  // The first, for a rank that stores for this one in the same collective.
  SlotStores& stores_in_exchange_with(int peer) const {
    return change_hands_ ? writer_.into_caches() : writer_.to(peer);
  }

 private:
  const transport::Transport& transport_;
  SlotWriter& writer_;
  size_t num_bytes_;  // of each message
  bool change_hands_;
  bool are_swapped_;
  size_t offset_;  // the same in every region
};

class Exchange {
 public:
  Exchange(transport::Transport& transport, Waiter& waiter, const WaitPolicy& policy,
           PeerWaitObserver& observer, SlotWriter& writer, uint64_t first_round)
      : transport_(transport),
        waiter_(waiter),
        policy_(policy),
        observer_(observer),
        writer_(writer),
        first_round_(first_round) {}

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  size_t slot_bytes() const { return transport_.geometry().slot_bytes; }
  // How long a chunk may be in a slot that holds one for each other rank, in whole cache lines.
  size_t share_of_slot() const { return share_of_slot(slot_bytes(), world_size()); }
  static size_t share_of_slot(size_t slot_bytes, int world_size) {
    const auto num_receivers = static_cast<size_t>(std::max(world_size - 1, 1));
    return slot_bytes / num_receivers / kCacheLineBytes * kCacheLineBytes;
  }

  // For collectives that copy and do not reduce; call before the first round. longest: bytes of the
  // longest part of any rank. Where that is less than a slot, slots are as short, so that short
  // parts also pass through all of their memory. Returns the number of slots that the rounds rotate
  // through.
  uint64_t use_copy_slots(uint64_t longest) {
    transport_.reserve_slots(transport::kNumCopySlots);
    const uint64_t num_lines = schedule::ceil_div(longest, kCacheLineBytes);
    stride_ = std::min<uint64_t>(num_lines * kCacheLineBytes, slot_bytes());
    num_slots_ = transport::kNumCopySlots * slot_bytes() / stride_;
    return num_slots_;
  }

  // For collectives in which all ranks store for each other; call before the first round, and not
  // with use_copy_slots(), of whose slots a peer's may not be reserved yet. Slots of two ranks
  // change hands, and shares of slots of any number. Returns as that does.
  uint64_t let_slots_change_hands() {
    change_hands_ = true;
    return num_slots_;
  }

  std::byte* own_slot(uint64_t round) const { return slot(rank(), round); }
  std::byte* slot(int peer, uint64_t round) const {
    return place(world_size() == 2 && is_swapped(round) ? 1 - peer : peer, round);
  }

  // Where such a slot holds the sender's chunk for the receiver.
  std::byte* share(int sender, int receiver, uint64_t round) const {
    if (is_swapped(round)) std::swap(sender, receiver);
    const int index = schedule::index_of_peer(sender, world_size(), receiver);
    return place(sender, round) + static_cast<size_t>(index) * share_of_slot();
  }

  // Stores into own slots, for one other rank that reads them, and for all.
  SlotStores& stores_to(int reader) {
    return change_hands_ ? writer_.into_caches() : writer_.to(reader);
  }
  SlotStores& stores_to_all() {
    return change_hands_ && world_size() == 2 ? writer_.into_caches() : writer_.to_all();
  }

  // Peers may now read the own slot of `round`.
  void publish_filled(uint64_t round) {
    waiter_.publish(transport_.own_control().filled, first_round_ + round + 1);
  }
  // This rank has read its part of the peers' slots of `round` and, in two_shot, written the sums
  // there. two_level counts stages instead of rounds.
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
  bool is_swapped(uint64_t round) const {
    return change_hands_ && (first_round_ + round) / num_slots_ % 2 == 1;
  }
  std::byte* place(int owner, uint64_t round) const {
    return transport_.region(owner).slots() + (first_round_ + round) % num_slots_ * stride_;
  }

  void wait(const Flag& flag, uint64_t round, int peer, std::string_view phase) {
    const uint64_t target = first_round_ + round + 1;
    if (flag.load() >= target) return;
    observer_.begin_wait(peer, phase, round);
    waiter_.wait(flag, target, policy_, observer_);
  }

  transport::Transport& transport_;
  Waiter& waiter_;
  const WaitPolicy& policy_;
  PeerWaitObserver& observer_;
  SlotWriter& writer_;
  uint64_t first_round_;
  uint64_t num_slots_ = transport::kNumSlots;
  uint64_t stride_ = slot_bytes();  // from one slot to the next
  bool change_hands_ = false;
};

}  // namespace rota::cpu
