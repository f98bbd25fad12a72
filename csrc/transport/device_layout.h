// The memory of one rank's region on a GPU, which all its peers map: the only place that knows
// offsets, compiled for host and device.
//
//   link ends [channel][peer] | channels | packets [channel][parity][source], each behind its
//   header | slots [channel][source][slot]
//
// Everything goes through links. Every ordered pair of ranks has one in every channel (a block of
// the kernel): a first-in-first-out queue of messages, whose slots lie with the receiver. So data
// and flags are only ever written over a connection, never read, and every wait polls local memory.
// csrc/README.md has the table of sync words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace rota::transport {

// What the second-level cache moves at once is 32 bytes, what it tracks 128.
inline constexpr size_t kDeviceLineBytes = 128;

// Message m of a launch uses slot m % kNumLinkSlots of its link. Rings need 2: a rank can only take
// a message once it may send the next one on.
inline constexpr int kNumLinkSlots = 2;

struct alignas(kDeviceLineBytes) DeviceFlag {
  uint64_t value;
  uint64_t payload;  // may be written, by the same thread, before the value that publishes it
};

// What the counts of a region hold once nothing of its rank is left but graphs: more messages than
// anybody waits for, so that their kernels write to no peer until they give up.
inline constexpr uint64_t kRetired = uint64_t{1} << 62;

// One rank's end of the two links that join it with one peer, in one channel. All words but the
// payload count messages through the life of the communicator; all rest at 0.
struct LinkEnd {
  // Writer: the peer; messages that it has put into this rank's slots. The payload is the
  // fingerprint (cuda/collective_args.h) of the launch that the last first message belongs to.
  DeviceFlag filled;
  DeviceFlag drained;  // writer: the peer; messages of this rank's that it has read
  struct alignas(kDeviceLineBytes) Counts {
    uint64_t sent;
    uint64_t received;
  } counts;  // this rank's own, from launch to launch
};

// What a channel remembers from launch to launch.
struct alignas(kDeviceLineBytes) ChannelState {
  uint64_t packet_rounds;  // of low_latency
};

// What every rank must agree on.
struct DeviceGeometry {
  int world_size;
  int num_channels;
  size_t slot_bytes;    // a multiple of kDeviceLineBytes
  size_t packet_bytes;  // what one rank sends in packets, in one channel; likewise

  HOST_DEVICE constexpr size_t link_end(int channel, int peer) const {
    return pair(channel, peer) * sizeof(LinkEnd);
  }
  HOST_DEVICE constexpr size_t channel_state(int channel) const {
    return link_end(num_channels, 0) + static_cast<size_t>(channel) * sizeof(ChannelState);
  }
  HOST_DEVICE constexpr size_t packet_header(int channel, uint64_t parity, int source) const {
    const size_t place = pair(channel, source) * 2 + parity % 2;
    return channel_state(num_channels) + place * (kDeviceLineBytes + packet_bytes);
  }
  HOST_DEVICE constexpr size_t packets(int channel, uint64_t parity, int source) const {
    return packet_header(channel, parity, source) + kDeviceLineBytes;
  }
  HOST_DEVICE constexpr size_t slot(int channel, int source, uint64_t message) const {
    const size_t place = pair(channel, source) * kNumLinkSlots + message % kNumLinkSlots;
    return packet_header(num_channels, 0, 0) + place * slot_bytes;
  }
  HOST_DEVICE constexpr size_t num_bytes() const { return slot(num_channels, 0, 0); }

  bool operator==(const DeviceGeometry&) const = default;

 private:
  HOST_DEVICE constexpr size_t pair(int channel, int peer) const {
    return static_cast<size_t>(channel) * static_cast<size_t>(world_size) +
           static_cast<size_t>(peer);
  }
};

}  // namespace rota::transport
