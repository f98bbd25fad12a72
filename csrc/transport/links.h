// One rank's links to its peers: first-in-first-out queues of messages of up to link_slot_bytes,
// one for each ordered pair of ranks, in the verbs of cuda/links.h.
//
//   sender    to_send(peer) is there ... write outgoing(peer) ... publish(peer)
//   receiver  to_read(peer) is there ... read incoming(peer) ... release(peer)
//
// The slots lie with the sender, which alone writes them, and its peers only read; on GPUs they lie
// with the receiver, because stores cross a connection faster than loads. Not safe for several
// threads at once.
#pragma once

#include <array>
#include <cstdint>

#include "base/waiter.h"
#include "transport/transport.h"

namespace rota::transport {

class Links {
 public:
  // waiter must use the sleep flag sleeping_on_links.
  Links(Transport& transport, Waiter& waiter) : transport_(transport), waiter_(waiter) {}

  // Call before the first message to this peer. Throws Error(kTransport) if memory is short.
  void open(int peer) {
    if (sent_[peer] == 0) transport_.reserve(transport_.geometry().link(peer));
  }

  // Holds once a slot is free: the peer has read the oldest of the last kNumHostLinkSlots messages.
  Awaited to_send(int peer) const {
    const uint64_t num_read =
        sent_[peer] < kNumHostLinkSlots ? 0 : sent_[peer] + 1 - kNumHostLinkSlots;
    return {&transport_.region(peer).control().link_drained[transport_.rank()], num_read};
  }
  std::byte* outgoing(int peer) const {
    return transport_.own().at(transport_.geometry().link_slot(peer, sent_[peer]));
  }
  void publish(int peer) {
    waiter_.publish(transport_.own_control().link_filled[peer], ++sent_[peer]);
  }

  // Holds once the next message has arrived.
  Awaited to_read(int peer) const {
    const ControlBlock& control = transport_.region(peer).control();
    return {&control.link_filled[transport_.rank()], received_[peer] + 1};
  }
  const std::byte* incoming(int peer) const {
    const size_t offset = transport_.geometry().link_slot(transport_.rank(), received_[peer]);
    return transport_.region(peer).at(offset);
  }
  void release(int peer) {
    waiter_.publish(transport_.own_control().link_drained[peer], ++received_[peer]);
  }

 private:
  Transport& transport_;
  Waiter& waiter_;
  std::array<uint64_t, kMaxWorldSize> sent_{};      // by receiver
  std::array<uint64_t, kMaxWorldSize> received_{};  // by sender
};

}  // namespace rota::transport
