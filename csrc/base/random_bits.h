// The random numbers of stochastic rounding: stateless functions of seed, stream and position, so
// they depend on neither algorithm nor machine. Not cryptographic.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/limits.h"

namespace rota {

// Steele, Lea and Flood's SplitMix64: neighbouring values give unrelated numbers.
HOST_DEVICE_INLINE constexpr uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// The stream for rounding results; contributions use the stream numbered by their rank.
inline constexpr int kResultStream = kMaxWorldSize;

// The key of a tile: its element i uses random_of(key + i). The seed is mixed before the stream is
// added; otherwise stream 1 of one seed would be stream 0 of the next.
HOST_DEVICE_INLINE constexpr uint32_t tile_key(uint64_t seed, uint64_t stream, uint64_t tile) {
  return static_cast<uint32_t>(mix(mix(mix(seed) + stream) + tile));
}

// Wellons's lowbias32 of a counter: every bit of the result depends on every bit of the counter.
// U is uint32_t or a vector of them.
template <typename U>
HOST_DEVICE_INLINE constexpr U random_of(U counter) {
  counter = (counter ^ (counter >> 16)) * 0x21f0aaad;
  counter = (counter ^ (counter >> 15)) * 0x735a2d97;
  return counter ^ (counter >> 15);
}

}  // namespace rota
