// A small seeded generator with the same numbers on every rank and machine.
#pragma once

#include <cstdint>

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
  explicit Random(uint64_t seed) : state_(mix(seed)) {}

  uint64_t next() { return mix(state_++); }
  // In [0, bound).
  uint64_t below(uint64_t bound) { return next() % bound; }
  template <typename Container>
  auto choose(const Container& container) {
    return *(std::begin(container) + below(std::size(container)));
  }

 private:
  uint64_t state_;
};

}  // namespace rota::test
