// What travels between hosts for windows: a header, data, and the number of the packet once more,
// so that a packet that is cut short is noticed. Ranks run the same build, so layouts agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "base/dtype.h"
#include "base/error.h"
#include "base/wire_format.h"
#include "hosts/scratch.h"

namespace rota::hosts {

// Data of one packet, at most. Four of them are on their way to a rank at a time (window_peer.h):
// 2 MiB, 17 ms of a link of 1 Gbit/s, so the wire has work while answers travel. Each costs four
// wake-ups: a put of 64 MiB with no limit to the link took 92 ms with eight of 256 KiB, and 53 with
// four of 512 KiB (2 cores of an AMD EPYC (Zen 5) VM, 2026-11-25, `python benchmarks/windows.py
// --hosts --rate none`).
inline constexpr size_t kPacketDataBytes = 512 << 10;
// What every link gets at first, and a slow one stays at.
inline constexpr size_t kLeastPacketDataBytes = 80 << 10;

struct WindowPacket {
  enum class Kind : uint32_t {
    // Requests. Each has one answer, in the order of the requests.
    kPut,         // data to `first`, a byte
    kGet,         // asks for `num` bytes from `first` on
    kAccumulate,  // data to `first`, an element: `num` elements, in the wire format if there is one
    kSignal,      // on `channel`
    kIsOpen,      // fails unless the window is open
    kClosed,      // the sender has closed the window
    kPing,        // asks for a sign of life
    // Answers.
    kDone,    // with the data of a get
    kFailed,  // `error`, and its text as data
    // A sign of life while a request takes long.
    kBusy,
  };
  static constexpr uint32_t kNumKinds = static_cast<uint32_t>(Kind::kBusy) + 1;
  static constexpr uint64_t kMagic = 0x776f646e69772d31;

  uint64_t magic = kMagic;
  Kind kind = Kind::kPing;
  uint32_t channel = 0;
  uint64_t number = 0;  // of a request to this rank, from 1 on; an answer has its request's
  uint64_t window = 0;  // a number that its ranks agree on
  uint64_t first = 0;
  uint64_t num = 0;
  uint64_t data_bytes = 0;
  ErrorKind error = ErrorKind::kNone;
  uint32_t dtype = 0;
  uint32_t wire_dtype = 0;
  uint32_t has_wire = 0;
  uint32_t is_block_scaled = 0;

  bool is_request() const { return kind <= Kind::kPing; }
  std::optional<WireFormat> wire() const {
    if (has_wire == 0) return std::nullopt;
    return WireFormat{static_cast<DType>(wire_dtype), is_block_scaled != 0};
  }
};

// Memory of one packet, for a message; pages that no packet has reached take no memory.
class PacketBuffer {
 public:
  PacketBuffer() { new (bytes_.get()) WindowPacket; }

  static constexpr size_t kDataBegin = Scratch::round_up(sizeof(WindowPacket));
  static constexpr size_t kNumBytes = kDataBegin + kPacketDataBytes + sizeof(uint64_t);

  WindowPacket& header() { return *reinterpret_cast<WindowPacket*>(bytes_.get()); }
  std::byte* data() { return bytes_.get() + kDataBegin; }
  std::byte* message() { return bytes_.get(); }

  // Ends the packet, whose header and data are there; returns the length of its message.
  size_t seal() {
    std::memcpy(data() + header().data_bytes, &header().number, sizeof(uint64_t));
    return kDataBegin + header().data_bytes + sizeof(uint64_t);
  }
  // Whether what has arrived is a whole packet.
  bool is_sealed() {
    const WindowPacket& packet = header();
    if (packet.magic != WindowPacket::kMagic || packet.data_bytes > kPacketDataBytes ||
        static_cast<uint32_t>(packet.kind) >= WindowPacket::kNumKinds) {
      return false;
    }
    return std::memcmp(data() + packet.data_bytes, &packet.number, sizeof(uint64_t)) == 0;
  }

 private:
  AlignedBytes bytes_ = aligned_bytes(kNumBytes);
};

}  // namespace rota::hosts
