// What a cost consists of, and how it is added up: bytes over links, bytes of device memory,
// messages, and waits in a row of one rank. Knows no collective; cost.h does.
#pragma once

#include <cstdint>

#include "base/wire_format.h"

namespace rota::schedule {

// What a collective moves, and in what portions.
struct Message {
  uint64_t num_elems;
  WireFormat tensor;       // a packed bucket has scales
  WireFormat wire;         // of contributions and results
  WireFormat hop;          // of partial sums
  uint64_t slot_bytes;     // of one link, all channels together
  uint64_t granule_elems;  // what pieces are multiples of; of a bucket: its tile
};

struct Cost {
  // Over links, both directions of both ways to move bytes.
  uint64_t sent_bytes = 0;             // stored by this rank into peers' memory
  uint64_t received_bytes = 0;         // stored by peers into this rank's memory
  uint64_t read_from_peers_bytes = 0;  // loaded by this rank from peers' memory
  uint64_t read_by_peers_bytes = 0;    // loaded by peers from this rank's memory
  // In this rank's memory, whoever loads or stores; no cache is assumed to save any.
  uint64_t hbm_read_bytes = 0;
  uint64_t hbm_written_bytes = 0;
  // Sent by this rank, each with one flag (low_latency: one in each packet) or nothing but a flag.
  int64_t num_messages = 0;
  // The longest chain of waits, each for what a rank did after the one before; the same on every
  // rank.
  int64_t waits_in_a_row = 0;
};

// Writes down what one rank does.
class Tally {
 public:
  explicit constexpr Tally(const Message& message) : message_(message) {}

  constexpr const Cost& cost() const { return cost_; }

  constexpr void read_tensor(uint64_t num_elems) {
    cost_.hbm_read_bytes += message_.tensor.num_bytes(num_elems);
  }
  constexpr void write_tensor(uint64_t num_elems) {
    cost_.hbm_written_bytes += message_.tensor.num_bytes(num_elems);
  }
  // Between the waits of a collective, in memory of this rank's own.
  constexpr void keep_partial(uint64_t num_elems) {
    cost_.hbm_written_bytes += message_.hop.num_bytes(num_elems);
  }
  constexpr void take_partial(uint64_t num_elems) {
    cost_.hbm_read_bytes += message_.hop.num_bytes(num_elems);
  }

  constexpr void send(uint64_t num_bytes) {
    cost_.sent_bytes += num_bytes;
    ++cost_.num_messages;
  }
  // The peer writes the slot, this rank reads it.
  constexpr void receive(uint64_t num_bytes) {
    cost_.received_bytes += num_bytes;
    cost_.hbm_written_bytes += num_bytes;
    cost_.hbm_read_bytes += num_bytes;
  }
  constexpr void wait() { ++cost_.waits_in_a_row; }

  // From tensor to tensor, without slots.
  constexpr void load_from_peer(uint64_t num_elems) {
    cost_.read_from_peers_bytes += message_.tensor.num_bytes(num_elems);
  }
  constexpr void loaded_by_peer(uint64_t num_elems) {
    cost_.read_by_peers_bytes += message_.tensor.num_bytes(num_elems);
    read_tensor(num_elems);
  }
  constexpr void store_to_peer(uint64_t num_elems) {
    cost_.sent_bytes += message_.tensor.num_bytes(num_elems);
  }
  constexpr void stored_by_peer(uint64_t num_elems) {
    cost_.received_bytes += message_.tensor.num_bytes(num_elems);
    write_tensor(num_elems);
  }

 private:
  const Message& message_;
  Cost cost_;
};

}  // namespace rota::schedule
