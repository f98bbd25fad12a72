// low_latency: one_shot for the smallest messages. A packet is written and read at once: 4 bytes of
// data, and 4 bytes with the number of the round, which show that the data has arrived. So nothing
// needs ordering, and there is no second wait. One wait in a row; each rank sends 2 * (world_size -
// 1) * num_bytes. A header of two more packets, exchanged by threads that have no data, carries the
// launch's fingerprint.
//
// Rounds alternate between two buffers. A packet of round r overwrites one of round r - 2, which
// its reader has already read: the reader has sent this rank a packet of round r - 1, and did so
// after its own launch of round r - 2 had ended. That is why every channel of a launch must move
// something.
#pragma once

#include "cuda/peers.h"
#include "cuda/sources.h"
#include "cuda/spoil.h"
#include "cuda/wait.h"
#include "schedule/direct.h"

namespace rota::cuda {

template <typename Codec, typename Block>
class Packets {
 public:
  static constexpr uint32_t kPacketsPerUnit = kAccessBytes / sizeof(uint32_t);
  static_assert(Codec::kLanes == 1, "a scale would need a packet of its own");

  HOST_DEVICE Packets(const Elements<Codec, Block>& elements, const Peers& peers,
                      const Range& chunk)
      : elements_(elements), peers_(peers), chunk_(chunk), round_(state().packet_rounds + 1) {}

  HOST_DEVICE bool is_retired() const { return round_ > transport::kRetired; }
  HOST_DEVICE bool is_complete() const { return is_complete_; }

  HOST_DEVICE void send() const {
    const Block& block = elements_.block();
    elements_.template for_each_unit<1>(
        elements_.whole_block(), elements_.length_of(chunk_),
        [&]<bool kIsWhole, uint32_t kUnits>(const Units<kUnits>& units) {
          const auto own = Codec::template read<kIsWhole>(block, elements_.input(chunk_),
                                                          units.elem[0], units.num_elems[0]);
          const auto& words = own.payload.words;
          for (int index = 0; index < peers_.world_size() - 1; ++index) {
            const int peer = schedule::rotated_peer(rank(), peers_.world_size(), index);
            uint64_t* packets = packets_at(peer, rank(), units.elem[0]);
            ROTA_UNROLL
            for (uint32_t i = 0; i < kPacketsPerUnit; i += 2) {
              block.store_pair(packets + i, packet(words[i]), packet(words[i + 1]));
            }
          }
        });
    for_own_peer([&](int peer) {
      block.store_pair(header_at(peer, rank()), packet(fingerprint_word(0)),
                       packet(fingerprint_word(1)));
    });
  }

  // A source of contributions (cuda/elements.h), by rank.
  using Loaded = typename Codec::Encoded;
  HOST_DEVICE int num() const { return peers_.world_size(); }
  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void load(int source, const Units<kUnits>& units,
                               Loaded (&loaded)[kUnits]) const {
    if (source == rank()) {
      return elements_.template read<kIsWhole>(elements_.input(chunk_), units, loaded);
    }
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      loaded[u] = recv(source, units.elem[u], units.num_elems[u]);
    }
  }
  HOST_DEVICE_INLINE typename Codec::Values decode(const Loaded& loaded) const {
    return Codec::decode(elements_.block(), loaded);
  }

  // Called after the sum, so that the data does not wait for the comparison. Gives up if a peer is
  // in another launch.
  HOST_DEVICE void compare_launches() const {
    for_own_peer([&](int peer) {
      const Block& block = elements_.block();
      uint64_t fingerprint = 0;
      const auto has_arrived = [&] {
        const auto [low, high] = block.load_pair(header_at(rank(), peer));
        fingerprint = high << 32 | (low & 0xffffffff);
        return is_of_this_round(low) && is_of_this_round(high);
      };
      is_complete_ = is_complete_ &&
                     wait_until(block, peers_, peer, WaitPhase::kPacket, has_arrived) &&
                     is_same_launch(block, peers_, peer, WaitPhase::kPacket,
                                    elements_.args().fingerprint, fingerprint);
    });
  }

  // Called after a barrier, when all threads have read the number of the round.
  HOST_DEVICE void count_round() const {
    if (elements_.block().thread() == 0) state().packet_rounds = round_;
  }

 private:
  // Receives the packets of one unit.
  HOST_DEVICE_INLINE Loaded recv(int source, uint32_t elem, uint32_t num_elems) const {
    const Block& block = elements_.block();
    uint64_t* packets = packets_at(rank(), source, elem);
    Loaded received{};
    const auto have_arrived = [&] {
      bool is_there = true;
      ROTA_UNROLL
      for (uint32_t i = 0; i < kPacketsPerUnit; i += 2) {
        const auto [first, second] = block.load_pair(packets + i);
        is_there &= is_of_this_round(first) & is_of_this_round(second);
        received.payload.words[i] = static_cast<uint32_t>(first);
        received.payload.words[i + 1] = static_cast<uint32_t>(second);
      }
      return is_there;
    };
    // After one wait was given up, the launch's other packets are not waited for.
    if (num_elems != 0 && is_complete_) {
      is_complete_ = wait_until(block, peers_, source, WaitPhase::kPacket, have_arrived);
    }
    return received;
  }

  HOST_DEVICE int rank() const { return peers_.rank_of(elements_.block()); }
  HOST_DEVICE transport::ChannelState& state() const {
    const size_t offset = peers_.geometry.channel_state(elements_.block().index());
    return *reinterpret_cast<transport::ChannelState*>(peers_.regions[rank()] + offset);
  }
  HOST_DEVICE uint64_t* packets_at(int owner, int source, uint32_t elem) const {
    const size_t offset = peers_.geometry.packets(elements_.block().index(), round_, source);
    auto* packets = reinterpret_cast<uint64_t*>(peers_.regions[owner] + offset);
    return packets + elem / Codec::kElems * kPacketsPerUnit;
  }
  HOST_DEVICE uint64_t* header_at(int owner, int source) const {
    const size_t offset = peers_.geometry.packet_header(elements_.block().index(), round_, source);
    return reinterpret_cast<uint64_t*>(peers_.regions[owner] + offset);
  }
  HOST_DEVICE uint32_t fingerprint_word(int index) const {
    return static_cast<uint32_t>(elements_.args().fingerprint >> (32 * index));
  }
  // Calls body(peer) with this thread's peer, if it has one. The last threads have peers, because a
  // short message leaves them without data.
  template <typename Body>
  HOST_DEVICE void for_own_peer(const Body& body) const {
    const Block& block = elements_.block();
    const int index = block.num_threads() - 1 - block.thread();
    if (index < peers_.world_size() - 1) {
      body(schedule::rotated_peer(rank(), peers_.world_size(), index));
    }
  }
  HOST_DEVICE uint64_t packet(uint32_t data) const { return round_ << 32 | data; }
  HOST_DEVICE bool is_of_this_round(uint64_t packet) const {
    return packet >> 32 == (round_ & 0xffffffff);
  }

  const Elements<Codec, Block>& elements_;
  const Peers& peers_;
  Range chunk_;
  uint64_t round_;
  mutable bool is_complete_ = true;
};

// Channel i moves chunk i; there are as many channels as chunks.
template <typename Codec, Sums kSums, typename Block>
HOST_DEVICE void low_latency(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Elements<Codec, Block> elements(block, args);
  const Range chunk =
      schedule::chunk_of(args.num_elems, args.chunk_elems, static_cast<uint64_t>(block.index()));
  const Packets<Codec, Block> packets(elements, peers, chunk);
  // It would send before it waits.
  if (packets.is_retired()) {
    spoil_results(block, peers.rank_of(block), args);
    return;
  }
  packets.send();
  const auto output = [&](int) { return elements.output(chunk); };
  elements.template reduce_all<kSums>(chunk, packets, Results(elements, chunk.begin, 1, output));
  packets.compare_launches();
  if (block.all(packets.is_complete())) {
    packets.count_round();
  } else {
    spoil_results(block, peers.rank_of(block), args);
  }
}

}  // namespace rota::cuda
