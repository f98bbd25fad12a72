// The exact sum of sums of squares of float32 numbers. Integers add in any order to the same sum,
// so a norm depends neither on how many ranks have which part of it nor on the order of the parts.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace rota {

class ExactSum {
 public:
  // The lowest word counts this unit, the square of float32's smallest number. The largest square
  // is below 2^256; 2^84 of them fit.
  static constexpr int kUnitExponent = -298;
  static constexpr size_t kNumWords = 10;
  using Words = std::array<uint64_t, kNumWords>;

  // value: finite, not negative, a multiple of the unit.
  void add(double value) {
    if (value == 0) return;
    constexpr int kMantissaBits = 53;
    int exponent = 0;
    const double fraction = std::frexp(value, &exponent);
    auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, kMantissaBits));
    int shift = exponent - kMantissaBits - kUnitExponent;
    if (shift < 0) mantissa >>= -shift;
    if (shift < 0) shift = 0;
    const auto word = static_cast<size_t>(shift / 64);
    add_with_carry(word, mantissa << shift % 64);
    if (shift % 64 != 0) add_with_carry(word + 1, mantissa >> (64 - shift % 64));
  }

  const Words& words() const { return words_; }

 private:
  void add_with_carry(size_t word, uint64_t bits) {
    for (; bits != 0 && word < kNumWords; ++word) {
      words_[word] += bits;
      bits = words_[word] < bits ? 1 : 0;
    }
  }

  Words words_{};
};

}  // namespace rota
