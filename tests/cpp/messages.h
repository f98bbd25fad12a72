// What the cases of send and recv share: messages that differ, and blocking calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "core/communicator.h"
#include "random.h"
#include "ranks.h"

namespace rota::test {

using Bytes = std::vector<uint8_t>;

constexpr size_t kCell = kSmall.cell_bytes;
constexpr uint64_t kNumCells = kSmall.num_cells;
constexpr size_t kLink = kNumCells * kCell;  // one rank's cells

// The content of message `number` of `source`; any two differ from the first byte on.
inline Bytes content(int source, uint64_t number, size_t num_bytes) {
  Bytes bytes(num_bytes);
  uint64_t value = mix(number * 64 + static_cast<uint64_t>(source));
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(value >> 56);
    value = value * 0x5851f42d4c957f2d + 1;
  }
  return bytes;
}

inline Message message_of(const Bytes& bytes, uint64_t tag = 0) {
  return {.tag = tag, .dtype = DType::kUInt8, .num_elems = bytes.size()};
}

inline void send(Communicator& communicator, const Bytes& bytes, int peer, uint64_t tag = 0) {
  communicator.point_to_point().run(Direction::kSend, const_cast<uint8_t*>(bytes.data()),
                                    message_of(bytes, tag), peer, CallerThread::kUser);
}

// Returns the sender's rank.
inline int recv(Communicator& communicator, Bytes& bytes, int peer, uint64_t tag = 0) {
  return communicator.point_to_point().run(Direction::kRecv, bytes.data(), message_of(bytes, tag),
                                           peer, CallerThread::kUser);
}

inline void check_recv(Communicator& communicator, const Bytes& expected, int peer,
                       uint64_t tag = 0) {
  Bytes bytes(expected.size(), 0xee);
  recv(communicator, bytes, peer, tag);
  check(bytes == expected, "another message has come");
}

}  // namespace rota::test
