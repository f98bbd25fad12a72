// Checks the formulas of the number formats, one scalar at a time, against the definitions in
// reference.h: all codes, and floats around every point where the rounding changes. CUDA kernels
// use these scalar instances; loops_cases.cpp and wire_loops_cases.cpp check the vector ones.
#include "base/float_bits.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "base/random_bits.h"
#include "check.h"
#include "random.h"
#include "reference.h"

namespace rota::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A format by its definition. Scaled float8_e4m3fn differs from the dtype itself in one code.
template <DType kDType, bool kIsScaled = false>
struct Format {
  static constexpr FloatFormat kBits = float_format(kDType, kIsScaled);
  static constexpr uint64_t kSign = uint64_t{1} << (kBits.num_bits - 1);
  static constexpr bool kHasInfCode = kIsScaled && kDType == DType::kFloat8E4M3;

  static uint64_t rounded(double value) {
    const uint64_t bits = round_to(kDType, value);
    const bool is_beyond = !std::isnan(value) && (bits & ~kSign) >= 0x7e;
    return kHasInfCode && is_beyond ? 0x7e | (bits & kSign) : bits;
  }
  static double value_of(uint64_t code) {
    if (kHasInfCode && (code & ~kSign) == 0x7e) return code & kSign ? -kInf : kInf;
    return to_double(kDType, code);
  }
  static bool is_same(uint64_t a, uint64_t b) { return test::is_same(kDType, a, b); }
};

// All non-negative numbers of the format in ascending order, and the one that would come next.
template <typename Format>
std::vector<double> all_magnitudes() {
  std::vector<double> values;
  for (uint64_t code = 0; code <= Format::kBits.max_finite; ++code) {
    values.push_back(Format::value_of(code));
  }
  values.push_back(2 * values.back() - values[values.size() - 2]);
  return values;
}

// All numbers of the format, the ties between them, and the floats on both sides of each; also
// random bits, which give small and large magnitudes, Inf and NaN.
template <typename Format>
std::vector<float> floats_around_edges() {
  std::vector<float> values{kInf, NAN, 0x1p-149f, 0x1.fffffep-127f, 0x1.fffffep127f};
  const std::vector<double> magnitudes = all_magnitudes<Format>();
  for (size_t i = 0; i + 1 < magnitudes.size(); ++i) {
    for (const double edge : {magnitudes[i], (magnitudes[i] + magnitudes[i + 1]) / 2}) {
      const auto value = static_cast<float>(edge);
      values.insert(values.end(), {std::nextafterf(value, 0), value, std::nextafterf(value, kInf)});
    }
  }
  Random random(1);
  for (int i = 0; i < 100'000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.next())));
  }
  for (size_t i = 0, end = values.size(); i < end; ++i) values.push_back(-values[i]);
  return values;
}

template <typename Format>
void nearest_is_reference() {
  for (const float value : floats_around_edges<Format>()) {
    const uint64_t got = narrow_to_nearest<Format::kBits>(value);
    const uint64_t expected = Format::rounded(value);
    if (Format::is_same(got, expected)) continue;
    fail(join(value, " is rounded to bits ", got, ", expected ", expected));
  }
}

// Expects the neighbour towards zero, or the next one if adding the random fraction reaches it.
template <typename Format>
void at_random_adds_fraction() {
  constexpr int kFractionBits = kMantissaBits - Format::kBits.mantissa_bits;
  const std::vector<double> magnitudes = all_magnitudes<Format>();
  Random random(2);
  for (const float value : floats_around_edges<Format>()) {
    const auto bits = static_cast<uint32_t>(
        random.choose(std::array<uint64_t, 4>{0, 0xffffffff, random.next(), uint64_t{1} << 31}));
    const uint64_t got = narrow_at_random<Format::kBits>(value, bits);
    uint64_t expected = Format::rounded(value);
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude < magnitudes.back()) {
      const auto above = std::upper_bound(magnitudes.begin(), magnitudes.end(), magnitude);
      const auto code = static_cast<uint64_t>(above - magnitudes.begin()) - 1;
      const double place = (magnitude - above[-1]) / (above[0] - above[-1]);
      const double fraction = std::floor(std::ldexp(place, kFractionBits)) +
                              static_cast<double>(bits >> (32 - kFractionBits));
      const bool is_next = fraction >= std::ldexp(1, kFractionBits);
      const double rounded = is_next ? magnitudes[code + 1] : magnitudes[code];
      expected = Format::rounded(std::copysign(rounded, static_cast<double>(value)));
    }
    if (Format::is_same(got, expected)) continue;
    fail(join(value, " and random bits ", bits, " give bits ", got, ", expected ", expected));
  }
}

template <typename Format>
void widen_is_reference() {
  for (uint32_t code = 0; code < 1u << Format::kBits.num_bits; ++code) {
    const float got = widen<Format::kBits>(code);
    const double expected = Format::value_of(code);
    const bool is_equal = got == expected && std::signbit(got) == std::signbit(expected);
    check(is_equal || (std::isnan(got) && std::isnan(expected)),
          join("bits ", code, " are widened to ", got, ", expected ", expected));
  }
}

template <DType dtype, bool is_scaled = false>
void format_is_reference() {
  nearest_is_reference<Format<dtype, is_scaled>>();
  at_random_adds_fraction<Format<dtype, is_scaled>>();
  widen_is_reference<Format<dtype, is_scaled>>();
}

// Rounds to the odd one of the two floats around a float64, so that rounding again gives the same
// result as rounding once.
void odd_rounding_keeps_ties_apart() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (uint64_t code = 0; code + 1 < round_to(dtype, INFINITY); ++code) {
      const auto tie =
          static_cast<float>((to_double(dtype, code) + to_double(dtype, code + 1)) / 2);
      for (const float near : {tie, std::nextafter(tie, kInf)}) {
        const double at = near;
        for (const double value : {at, std::nextafter(at, 0), std::nextafter(at, INFINITY)}) {
          for (const double signed_value : {value, -value}) {
            const float odd = round_to_odd(signed_value);
            check(odd == signed_value || std::bit_cast<uint32_t>(odd) % 2 == 1, "it is even");
            check_equal(round_to(dtype, odd), round_to(dtype, signed_value),
                        join(name(dtype), " of ", signed_value));
          }
        }
      }
    }
  }
  check(std::isnan(round_to_odd(NAN)), "NaN is lost");
}

// Neighbouring seeds, streams and tiles have different keys; with seed + stream some would
// coincide.
void keys_of_neighbours_differ() {
  constexpr uint64_t kNumEach = 20;
  std::set<uint32_t> keys;
  for (uint64_t seed = 0; seed < kNumEach; ++seed) {
    for (uint64_t stream = 0; stream < kNumEach; ++stream) {
      for (uint64_t tile = 0; tile < kNumEach; ++tile) keys.insert(tile_key(seed, stream, tile));
    }
  }
  check_equal(keys.size(), size_t{kNumEach * kNumEach * kNumEach}, "the number of keys");
}

const CaseTable kCases{
    {"float_bits-float16", format_is_reference<DType::kFloat16>},
    {"float_bits-bfloat16", format_is_reference<DType::kBFloat16>},
    {"float_bits-e4m3", format_is_reference<DType::kFloat8E4M3>},
    {"float_bits-e5m2", format_is_reference<DType::kFloat8E5M2>},
    {"float_bits-e4m3-scaled", format_is_reference<DType::kFloat8E4M3, true>},
    {"float_bits_odd", odd_rounding_keeps_ties_apart},
    {"float_bits_keys", keys_of_neighbours_differ},
};

}  // namespace
}  // namespace rota::test
