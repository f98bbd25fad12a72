// A small seeded generator with the same numbers on every rank and machine.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>

namespace rota::test {

// SplitMix64 (Steele, Lea & Flood 2014).
constexpr uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

class Random {
 public:
  explicit Random(std::integral auto seed) : state_(mix(static_cast<uint64_t>(seed))) {}

  uint64_t next() { return mix(state_++); }
  // In [0, bound).
  template <std::integral T>
  T below(T bound) {
    return static_cast<T>(next() % static_cast<uint64_t>(bound));
  }
  template <typename Container>
  auto choose(const Container& container) {
    return *(std::begin(container) + below(std::size(container)));
  }

 private:
  uint64_t state_;
};

}  // namespace rota::test
