// One rank's links to its peers, in the verbs of cuda/links.h. A link carries messages in the order
// in which they are sent. A message begins in an envelope, a slot of fixed length; what does not
// fit goes through a ring of bytes, in pieces.
//
//   sender    to_begin(peer) is there ... write outgoing_envelope(peer) ... publish_envelope(peer)
//             to_send(peer, n) is there ... write outgoing(peer) ... publish(peer, n)
//   receiver  to_read(peer) is there ... read incoming_envelope(peer) ... release_envelope(peer)
//             to_read(peer) is there ... read incoming(peer) ... release(peer, n)
//
// A piece begins on a cache line and ends at the latest where the ring ends, so that it lies in one
// place. The receiver may take the bytes in other pieces.
//
// Short messages find the envelopes in the caches. Long ones want a ring that is longer than a
// second-level cache: there, both sides find its lines in the third level, instead of one in the
// other's second, which is slow (benchmarks/LOG.md).
//
// Both lie with the sender, which alone writes them, and its peers only read; on GPUs they lie with
// the receiver, because stores cross a connection faster than loads. Not safe for several threads
// at once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "base/prefetch.h"
#include "base/waiter.h"
#include "schedule/chunk.h"
#include "transport/transport.h"

namespace rota::transport {

class Links {
 public:
  // waiter must use the sleep flag sleeping_on_links.
  Links(Transport& transport, Waiter& waiter)
      : transport_(transport),
        geometry_(transport.geometry()),
        waiter_(waiter),
        ring_lines_(geometry_.ring_bytes / kCacheLineBytes),
        envelope_lines_(ring_lines_ / kNumEnvelopes) {}

  // Call before a message to this peer. Throws Error(kTransport) if memory is short.
  void open(int peer, bool needs_ring) {
    if (sent_[peer].envelopes == 0) transport_.reserve(geometry_.envelopes(peer));
    if (needs_ring && sent_[peer].ring_lines == 0) transport_.reserve(geometry_.ring(peer));
  }

  // Holds once an envelope is free.
  Awaited to_begin(int peer) const { return room_for(peer, envelope_lines_); }
  std::byte* outgoing_envelope(int peer) const {
    return transport_.own().at(envelope(peer, sent_[peer]));
  }
  void publish_envelope(int peer) {
    sent_[peer].add_envelope(envelope_lines_);
    publish_sent(peer);
  }

  // The bytes that the next piece may have.
  uint64_t longest_piece(int peer) const { return to_end(sent_[peer]) * kCacheLineBytes; }
  // Holds once the ring has room for a piece of num_bytes.
  Awaited to_send(int peer, uint64_t num_bytes) const {
    return room_for(peer, lines_of(num_bytes));
  }
  std::byte* outgoing(int peer) const { return transport_.own().at(ring(peer, sent_[peer])); }
  void publish(int peer, uint64_t num_bytes) {
    sent_[peer].add_piece(lines_of(num_bytes));
    publish_sent(peer);
  }

  // Fetches the cache lines of the ring's next num_bytes, which will be written: the receiver's
  // cache has them, or only memory, and a send would wait for each.
  void fetch_outgoing(int peer, uint64_t num_bytes) const {
    const std::byte* lines = outgoing(peer);
    const uint64_t num_lines = std::min(lines_of(num_bytes), to_end(sent_[peer]));
    for (uint64_t line = 0; line < num_lines; ++line) {
      prefetch_to_write(lines + line * kCacheLineBytes);
    }
  }

  // Holds once something has arrived.
  Awaited to_read(int peer) const { return {&filled(peer), received_[peer].lines + 1}; }
  const std::byte* incoming_envelope(int peer) const {
    return transport_.region(peer).at(envelope(transport_.rank(), received_[peer]));
  }
  void release_envelope(int peer) {
    received_[peer].add_envelope(envelope_lines_);
    publish_received(peer);
  }
  // What has arrived, up to the end of the ring: of the current message and then, where that ends,
  // bytes without a meaning.
  std::span<const std::byte> incoming(int peer) const {
    const Progress& received = received_[peer];
    const uint64_t there = filled(peer).load() - received.lines;
    return {transport_.region(peer).at(ring(transport_.rank(), received)),
            std::min(there, to_end(received)) * kCacheLineBytes};
  }
  void release(int peer, uint64_t num_bytes) {
    received_[peer].add_piece(lines_of(num_bytes));
    publish_received(peer);
  }

 private:
  // Of one side of a link. One count bounds both: an envelope counts as its share of the ring, so
  // that whoever sees room for it in the ring also knows that the envelope is free.
  struct Progress {
    uint64_t lines = 0;            // what link_filled and link_drained count
    uint64_t published_lines = 0;  // of link_drained
    uint64_t envelopes = 0;
    uint64_t ring_lines = 0;

    void add_envelope(uint64_t num_lines) {
      lines += num_lines;
      ++envelopes;
    }
    void add_piece(uint64_t num_lines) {
      lines += num_lines;
      ring_lines += num_lines;
    }
  };

  static uint64_t lines_of(uint64_t num_bytes) {
    return schedule::ceil_div(num_bytes, kCacheLineBytes);
  }
  size_t envelope(int receiver, const Progress& progress) const {
    return geometry_.envelope(receiver, progress.envelopes);
  }
  size_t ring(int receiver, const Progress& progress) const {
    return geometry_.ring(receiver).offset + progress.ring_lines % ring_lines_ * kCacheLineBytes;
  }
  uint64_t to_end(const Progress& progress) const {
    return ring_lines_ - progress.ring_lines % ring_lines_;
  }
  // Holds once what lay there has been read.
  Awaited room_for(int peer, uint64_t num_lines) const {
    const uint64_t end = sent_[peer].lines + num_lines;
    return {&transport_.region(peer).control().link_drained[transport_.rank()],
            end - std::min(end, ring_lines_)};
  }
  const Flag& filled(int peer) const {
    return transport_.region(peer).control().link_filled[transport_.rank()];
  }
  void publish_sent(int peer) {
    waiter_.publish(transport_.own_control().link_filled[peer], sent_[peer].lines);
  }
  // Once for a quarter of the link: the sender waits for no less, and each time the flag's line has
  // to move to this core and back.
  void publish_received(int peer) {
    Progress& received = received_[peer];
    if (received.lines - received.published_lines < ring_lines_ / 4) return;
    received.published_lines = received.lines;
    waiter_.publish(transport_.own_control().link_drained[peer], received.lines);
  }

  Transport& transport_;
  const Geometry& geometry_;
  Waiter& waiter_;
  uint64_t ring_lines_;
  uint64_t envelope_lines_;
  std::array<Progress, kMaxWorldSize> sent_{};      // by receiver
  std::array<Progress, kMaxWorldSize> received_{};  // by sender
};

}  // namespace rota::transport
