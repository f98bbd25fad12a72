// One rank's links to its peers, in the verbs of cuda/links.h. A link carries messages in the order
// in which they are sent. A message begins in an envelope, a slot of fixed length; what does not
// fit goes through one of two rings of bytes, in pieces.
//
//   sender    to_begin(peer) is there ... write outgoing_envelope(peer) ... publish_envelope(peer)
//             to_send(peer, r, n) is there ... write outgoing(peer, r) ... publish(peer, r, n)
//   receiver  to_read(peer) is there ... read incoming_envelope(peer) ... release_envelope(peer)
//             to_read(peer) is there ... read incoming(peer, r) ... release(peer, r, n)
//
// A piece begins on a cache line and ends at the latest where the ring ends, so that it lies in one
// place. The receiver may take the bytes in other pieces.
//
// Short messages find the envelopes in the caches, and somewhat longer ones the short ring, even
// where a program does much else between them. Long messages want a ring that is longer than a
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
        short_ring_(0, geometry_.short_ring_bytes(), geometry_.long_ring_bytes()),
        long_ring_(geometry_.short_ring_bytes(), geometry_.long_ring_bytes(),
                   geometry_.long_ring_bytes()),
        envelope_units_(schedule::ceil_div(long_ring_.num_lines, kNumEnvelopes)) {}

  // Call before a message to this peer. Throws Error(kTransport) if memory is short.
  void open(int peer, bool needs_ring) {
    if (sent_[peer].envelopes == 0) transport_.reserve(geometry_.envelopes(peer));
    if (needs_ring && !sent_[peer].has_used_rings()) transport_.reserve(geometry_.rings(peer));
  }

  // Holds once an envelope is free.
  Awaited to_begin(int peer) const { return room_for(peer, envelope_units_); }
  std::byte* outgoing_envelope(int peer) const {
    return transport_.own().at(envelope(peer, sent_[peer]));
  }
  void publish_envelope(int peer) {
    sent_[peer].add_envelope(envelope_units_);
    publish_sent(peer);
  }

  enum class Ring { kShort, kLong };
  // Of a message of this length.
  Ring ring_of(uint64_t num_bytes) const {
    return num_bytes <= geometry_.short_ring_bytes() / 4 ? Ring::kShort : Ring::kLong;
  }
  // The bytes that the next piece may have.
  uint64_t longest_piece(int peer, Ring ring) const {
    return to_end(sent_[peer], ring) * kCacheLineBytes;
  }
  // Holds once the ring has room for a piece of num_bytes.
  Awaited to_send(int peer, Ring ring, uint64_t num_bytes) const {
    return room_for(peer, lines_of(num_bytes) * shape_of(ring).line_units);
  }
  std::byte* outgoing(int peer, Ring ring) const {
    return transport_.own().at(place(peer, sent_[peer], ring));
  }
  void publish(int peer, Ring ring, uint64_t num_bytes) {
    add_piece(sent_[peer], ring, num_bytes);
    publish_sent(peer);
  }

  // Fetches the cache lines of a ring's next num_bytes, which will be written: the receiver's
  // cache has them, or only memory, and a send would wait for each.
  void fetch_outgoing(int peer, Ring ring, uint64_t num_bytes) const {
    const std::byte* lines = outgoing(peer, ring);
    const uint64_t num_lines = std::min(lines_of(num_bytes), to_end(sent_[peer], ring));
    for (uint64_t line = 0; line < num_lines; ++line) {
      prefetch_to_write(lines + line * kCacheLineBytes);
    }
  }

  // Holds once something has arrived.
  Awaited to_read(int peer) const { return {&filled(peer), received_[peer].units + 1}; }
  const std::byte* incoming_envelope(int peer) const {
    return transport_.region(peer).at(envelope(transport_.rank(), received_[peer]));
  }
  void release_envelope(int peer) {
    received_[peer].add_envelope(envelope_units_);
    publish_received(peer);
  }
  // What has arrived, up to the end of the ring: of the current message and then, where that ends,
  // bytes without a meaning.
  std::span<const std::byte> incoming(int peer, Ring ring) const {
    const Progress& received = received_[peer];
    const uint64_t there = (filled(peer).load() - received.units) / shape_of(ring).line_units;
    return {transport_.region(peer).at(place(transport_.rank(), received, ring)),
            std::min(there, to_end(received, ring)) * kCacheLineBytes};
  }
  void release(int peer, Ring ring, uint64_t num_bytes) {
    add_piece(received_[peer], ring, num_bytes);
    publish_received(peer);
  }

 private:
  // One count bounds all of a link, in units, of which it has as many as the long ring has lines.
  // An envelope, or a line of the short ring, takes its share of them. So whoever sees room for it
  // among the units also knows that the envelope or the line is free.
  struct RingShape {
    RingShape(size_t offset, size_t num_bytes, size_t long_ring_bytes)
        : offset(offset),
          num_lines(num_bytes / kCacheLineBytes),
          line_units(schedule::ceil_div(long_ring_bytes, num_bytes)) {}
    size_t offset;
    uint64_t num_lines;
    uint64_t line_units;
  };
  // Of one side of a link.
  struct Progress {
    uint64_t units = 0;            // what link_filled and link_drained count
    uint64_t published_units = 0;  // of link_drained
    uint64_t envelopes = 0;
    std::array<uint64_t, 2> num_lines{};  // by ring

    void add_envelope(uint64_t num_units) {
      units += num_units;
      ++envelopes;
    }
    bool has_used_rings() const { return num_lines[0] + num_lines[1] > 0; }
  };

  const RingShape& shape_of(Ring ring) const {
    return ring == Ring::kShort ? short_ring_ : long_ring_;
  }
  void add_piece(Progress& progress, Ring ring, uint64_t num_bytes) const {
    progress.units += lines_of(num_bytes) * shape_of(ring).line_units;
    progress.num_lines[static_cast<size_t>(ring)] += lines_of(num_bytes);
  }
  static uint64_t lines_of(uint64_t num_bytes) {
    return schedule::ceil_div(num_bytes, kCacheLineBytes);
  }
  size_t envelope(int receiver, const Progress& progress) const {
    return geometry_.envelope(receiver, progress.envelopes);
  }
  // The next line's place in the ring.
  uint64_t next_line(const Progress& progress, Ring ring) const {
    return progress.num_lines[static_cast<size_t>(ring)] % shape_of(ring).num_lines;
  }
  size_t place(int receiver, const Progress& progress, Ring ring) const {
    return geometry_.rings(receiver).offset + shape_of(ring).offset +
           next_line(progress, ring) * kCacheLineBytes;
  }
  uint64_t to_end(const Progress& progress, Ring ring) const {
    return shape_of(ring).num_lines - next_line(progress, ring);
  }
  // Of a link.
  uint64_t all_units() const { return long_ring_.num_lines; }
  // Holds once what lay there has been read.
  Awaited room_for(int peer, uint64_t num_units) const {
    const uint64_t end = sent_[peer].units + num_units;
    return {&transport_.region(peer).control().link_drained[transport_.rank()],
            end - std::min(end, all_units())};
  }
  const Flag& filled(int peer) const {
    return transport_.region(peer).control().link_filled[transport_.rank()];
  }
  void publish_sent(int peer) {
    waiter_.publish(transport_.own_control().link_filled[peer], sent_[peer].units);
  }
  // Once for a quarter of the link: the sender waits for no less, and each time the flag's line has
  // to move to this core and back.
  void publish_received(int peer) {
    Progress& received = received_[peer];
    if (received.units - received.published_units < all_units() / 4) return;
    received.published_units = received.units;
    waiter_.publish(transport_.own_control().link_drained[peer], received.units);
  }

  Transport& transport_;
  const Geometry& geometry_;
  Waiter& waiter_;
  RingShape short_ring_;
  RingShape long_ring_;
  uint64_t envelope_units_;
  std::array<Progress, kMaxWorldSize> sent_{};      // by receiver
  std::array<Progress, kMaxWorldSize> received_{};  // by sender
};

}  // namespace rota::transport
