// The wire loops of every instruction set that this CPU has, against scalars: blocks and scales
// from their definition (base/wire_format.h), roundings from reference.h, for every length of a
// tile.
#include <algorithm>
#include <array>
#include <cmath>

#include "check.h"
#include "cpu/element_loops.h"
#include "random.h"
#include "reference.h"
#include "schedule/sum_order.h"
#include "tables.h"

namespace rota::test {
namespace {

constexpr size_t kLength = 517;
constexpr int kNumSrcs = 4;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Blocks of similar magnitudes, of very different ones, of denormals and zeros; some Inf and NaN.
std::vector<float> random_floats(uint64_t seed) {
  Random random(seed);
  std::vector<float> values(kLength);
  for (size_t i = 0; i < kLength; ++i) {
    const double mantissa = std::ldexp(static_cast<double>(random.next() >> 11), -52) - 1;
    const int spread = random.below(200) - 100;
    const int exponents[] = {-9, spread, -140, 100};
    values[i] = static_cast<float>(std::ldexp(mantissa, exponents[i / 96 % 4]));
    if (random.below(50) == 0) values[i] = random.choose(std::array{0.0f, kInf, -kInf, NAN});
  }
  return values;
}

int scale_exponent(const WireFormat& format, const float* block, size_t num_elems) {
  float largest = 0;
  for (size_t i = 0; i < num_elems; ++i) {
    if (std::isfinite(block[i])) largest = std::max(largest, std::fabs(block[i]));
  }
  if (largest == 0) return 0;
  return std::max(std::ilogb(largest) - block_scaling(format.dtype).top_exponent,
                  kMinScaleExponent);
}

struct Scalars {
  std::vector<uint64_t> bits;
  std::vector<double> values;  // as a receiver reads them
  std::vector<int> exponents;  // by block
};

Scalars encode_scalars(const WireFormat& format, const float* values, size_t num_elems) {
  Scalars expected;
  const size_t block_elems = format.is_block_scaled ? block_scaling(format.dtype).block_elems : 64;
  for (size_t begin = 0; begin < num_elems; begin += block_elems) {
    const size_t length = std::min(block_elems, num_elems - begin);
    const int exponent =
        format.is_block_scaled ? scale_exponent(format, values + begin, length) : 0;
    expected.exponents.push_back(exponent);
    for (size_t i = begin; i < begin + length; ++i) {
      const double scaled = std::ldexp(static_cast<double>(values[i]), -exponent);
      uint64_t bits = round_to(format.dtype, scaled);
      double value = std::ldexp(to_double(format.dtype, bits), exponent);
      if (format.is_block_scaled && std::isinf(values[i])) {
        value = values[i];
        if (format.dtype == DType::kFloat8E4M3) bits = std::signbit(values[i]) ? 0xfe : 0x7e;
      }
      expected.bits.push_back(bits);
      expected.values.push_back(value);
    }
  }
  return expected;
}

// Memory for exactly num_elems elements: AddressSanitizer catches any access outside.
struct Encoded {
  Encoded(const WireFormat& format, size_t num_elems)
      : payload(format.payload_bytes(num_elems)), scales(format.num_scales(num_elems)) {}
  WirePlace place() { return {payload.data(), scales.data()}; }

  std::vector<std::byte> payload, scales;
};

void check_encoded(const cpu::ElementLoops& table, const WireFormat& format, Encoded& encoded,
                   const Scalars& expected) {
  const std::string what = join(table.isa, ' ', name(format.dtype), " of ", expected.bits.size());
  for (size_t i = 0; i < expected.bits.size(); ++i) {
    const uint64_t got = load_bits(format.dtype, encoded.payload.data(), i);
    if (!is_same(format.dtype, got, expected.bits[i])) {
      fail(join(what, ": element ", i, " has bits ", got, ", expected ", expected.bits[i]));
    }
  }
  for (size_t block = 0; block < encoded.scales.size(); ++block) {
    check_equal(static_cast<int>(encoded.scales[block]) - kScaleBias, expected.exponents[block],
                join(what, ": the exponent of block ", block));
  }
}

// Adds as the loops do: in float32, left to right or in pairs.
float sum_scalars(const std::vector<Scalars>& srcs, size_t elem, bool is_tree) {
  const auto value = [&](size_t source) { return static_cast<float>(srcs[source].values[elem]); };
  if (is_tree) return (value(0) + value(1)) + (value(2) + value(3));
  return ((value(0) + value(1)) + value(2)) + value(3);
}

void loops_give_scalar_bits(DType dtype, bool is_block_scaled) {
  const WireFormat format{dtype, is_block_scaled};
  for (const cpu::ElementLoops* table : all_tables()) {
    const cpu::WireLoops& loops = table->wire(format);
    for (size_t num_elems = 0; num_elems <= kLength; num_elems += num_elems < 130 ? 1 : 43) {
      std::vector<Encoded> srcs;
      std::vector<WirePlace> places;
      std::vector<Scalars> expected;
      for (uint64_t s = 0; s < kNumSrcs; ++s) {
        std::vector<float> values = random_floats(s + 1);
        values.resize(num_elems);
        values.shrink_to_fit();
        expected.push_back(encode_scalars(format, values.data(), num_elems));
        Encoded& encoded = srcs.emplace_back(format, num_elems);
        for (float& value : values) value *= 2;  // exact, and the factor undoes it
        loops.encode(values.data(), encoded.place(), num_elems, 0.5f);
        check_encoded(*table, format, encoded, expected.back());
      }
      for (Encoded& src : srcs) places.push_back(src.place());
      std::vector<float> sums(num_elems);
      for (const uint32_t num_shards : {0u, uint32_t{kNumSrcs}}) {
        const schedule::Additions additions({.num_shards = num_shards}, kNumSrcs);
        loops.decode_sum({places.data(), kNumSrcs, additions.of_ranks()}, sums.data(), num_elems,
                         0.25f);
        for (size_t i = 0; i < num_elems; ++i) {
          const float sum = sum_scalars(expected, i, num_shards != 0) * 0.25f;
          if (is_same(sums[i], sum)) continue;
          fail(join(table->isa, ' ', name(dtype), ": sum ", i, " of ", num_elems, " is ", sums[i],
                    ", expected ", sum));
        }
      }
    }
  }
}

// Every key gives one of the two neighbours, the same one in every instruction set.
void random_rounding_gives_neighbours(DType dtype, bool is_block_scaled) {
  const WireFormat format{dtype, is_block_scaled};
  const std::vector<float> values = random_floats(7);
  std::vector<std::byte> first;
  for (const cpu::ElementLoops* table : all_tables()) {
    const cpu::WireLoops& loops = table->wire(format);
    Encoded nearest(format, kLength), random(format, kLength);
    loops.encode(values.data(), nearest.place(), kLength, 1);
    for (uint32_t key = 0; key < 50; ++key) {
      loops.encode_at_random(values.data(), random.place(), kLength, 1, key * 0x9e3779b9);
      check(random.scales == nearest.scales, "scales depend on the rounding");
      for (size_t i = 0; i < kLength; ++i) {
        const auto a = static_cast<int64_t>(load_bits(dtype, random.payload.data(), i));
        const auto b = static_cast<int64_t>(load_bits(dtype, nearest.payload.data(), i));
        if (is_nan(dtype, static_cast<uint64_t>(a)) && is_nan(dtype, static_cast<uint64_t>(b))) {
          continue;
        }
        check(std::abs(a - b) <= 1, join(table->isa, ' ', name(dtype), ": element ", i,
                                         " has bits ", a, ", nearest ", b));
      }
    }
    if (first.empty()) first = random.payload;
    check(random.payload == first, join(table->isa, " rounds at random as no other"));
  }
}

void squares_do_not_depend_on_isa() {
  for (size_t num_elems = 0; num_elems <= kLength; ++num_elems) {
    std::vector<float> values = random_floats(3);
    for (float& value : values) {
      if (!std::isfinite(value)) value = 1;
    }
    values.resize(num_elems);
    values.shrink_to_fit();
    double expected = 0;
    for (const float value : values) expected += static_cast<double>(value) * value;
    const double first = all_tables()[0]->sum_of_squares(values.data(), num_elems);
    for (const cpu::ElementLoops* table : all_tables()) {
      const double squares = table->sum_of_squares(values.data(), num_elems);
      check_equal(squares, first, join(table->isa, ": the sum of ", num_elems, " squares"));
      // The tolerance is for the rounding of each addition.
      check(std::fabs(squares - expected) <= 1e-12 * expected, "the sum of squares is wrong");
    }
    if (num_elems == 0) continue;
    values[num_elems / 2] = NAN;
    for (const cpu::ElementLoops* table : all_tables()) {
      check(!std::isfinite(table->sum_of_squares(values.data(), num_elems)), "NaN is overlooked");
    }
  }
}

void formats_exist_for_floats_of_32_bits_and_fewer() {
  for (const cpu::ElementLoops* table : all_tables()) {
    for (size_t i = 0; i < kNumDTypes; ++i) {
      const auto dtype = static_cast<DType>(i);
      check_equal(table->wire({dtype}).encode != nullptr, is_wire_dtype(dtype), "a format exists");
      check_equal(table->wire({dtype, true}).encode != nullptr, has_block_scaling(dtype),
                  "a scaled format exists");
    }
  }
}

const CaseTable kCases{
    {"wire_loops-float32", loops_give_scalar_bits, DType::kFloat32, false},
    {"wire_loops-float16", loops_give_scalar_bits, DType::kFloat16, false},
    {"wire_loops-bfloat16", loops_give_scalar_bits, DType::kBFloat16, false},
    {"wire_loops-e4m3", loops_give_scalar_bits, DType::kFloat8E4M3, false},
    {"wire_loops-e5m2", loops_give_scalar_bits, DType::kFloat8E5M2, false},
    {"wire_loops-float16-scaled", loops_give_scalar_bits, DType::kFloat16, true},
    {"wire_loops-e4m3-scaled", loops_give_scalar_bits, DType::kFloat8E4M3, true},
    {"wire_loops-e5m2-scaled", loops_give_scalar_bits, DType::kFloat8E5M2, true},
    {"wire_loops_random-float16", random_rounding_gives_neighbours, DType::kFloat16, false},
    {"wire_loops_random-bfloat16", random_rounding_gives_neighbours, DType::kBFloat16, false},
    {"wire_loops_random-float16-scaled", random_rounding_gives_neighbours, DType::kFloat16, true},
    {"wire_loops_random-e4m3-scaled", random_rounding_gives_neighbours, DType::kFloat8E4M3, true},
    {"wire_loops_random-e5m2-scaled", random_rounding_gives_neighbours, DType::kFloat8E5M2, true},
    {"wire_loops_squares", squares_do_not_depend_on_isa},
    {"wire_loops_exist", formats_exist_for_floats_of_32_bits_and_fewer},
};

}  // namespace
}  // namespace rota::test
