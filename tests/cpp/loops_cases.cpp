// The element loops of every instruction set that this CPU has, against scalars (reference.h): same
// bits for every dtype, op, number of sources, length and alignment.
#include <algorithm>
#include <bit>
#include <cmath>

#include "base/flag.h"
#include "check.h"
#include "cpu/copy.h"
#include "cpu/element_loops.h"
#include "random.h"
#include "reference.h"
#include "schedule/sum_order.h"
#include "tables.h"

namespace rota::test {
namespace {

constexpr size_t kMaxLength = 130;
constexpr size_t kBigLength = 4099;
constexpr int kMaxSrcs = 5;

// Memory of exactly this many bytes, at any alignment: AddressSanitizer catches any access outside.
class Bytes {
 public:
  Bytes(size_t num_bytes, size_t misalignment)
      : bytes_(misalignment + num_bytes), misalignment_(misalignment) {}
  std::byte* data() { return bytes_.data() + misalignment_; }

 private:
  std::vector<std::byte> bytes_;
  size_t misalignment_;
};

// As bits: zeros, infinities, NaN, ones, and the limits of denormal and normal numbers.
std::vector<uint64_t> special_bits(DType dtype) {
  if (!info(dtype).is_floating)
    return {0, 1, ~0ull, ~0ull << 7, ~0ull >> 1, 1ull << 31, 1ull << 63};
  const uint64_t one = bits_of_integer(dtype, 1), infinity = round_to(dtype, INFINITY);
  const uint64_t sign = round_to(dtype, -0.0);
  const uint64_t min_normal = one & ~(one - 1);  // lowest bit of the exponent
  std::vector<uint64_t> bits{0,
                             1,
                             2,
                             3,
                             min_normal - 1,
                             min_normal,
                             min_normal + 1,
                             one - 1,
                             one,
                             one + 1,
                             infinity - 1,
                             infinity,
                             infinity + min_normal / 2};
  for (size_t i = 0, end = bits.size(); i < end; ++i) bits.push_back(bits[i] | sign);
  return bits;
}

// One third special values, one third random bits, one third of similar magnitude so that sums
// round.
uint64_t random_bits(DType dtype, Random& random) {
  const uint64_t kind = random.below(3);
  const uint64_t any = random.next();
  uint64_t bits = any;
  if (kind == 0) {
    bits = random.choose(special_bits(dtype));
  } else if (kind == 1 && info(dtype).is_floating) {
    const double mantissa = 1 + std::ldexp(static_cast<double>(any >> 12), -52);
    bits = round_to(dtype, std::ldexp(any & 1 ? mantissa : -mantissa, static_cast<int>(any % 8)));
  }
  const size_t num_bits = 8 * info(dtype).num_bytes;
  return num_bits == 64 ? bits : bits & ((uint64_t{1} << num_bits) - 1);
}

std::vector<uint64_t> random_elems(DType dtype, size_t num_elems, uint64_t seed) {
  Random random(seed);
  std::vector<uint64_t> elems(num_elems);
  for (uint64_t& bits : elems) bits = random_bits(dtype, random);
  return elems;
}

struct ReduceProblem {
  DType dtype;
  ReduceOp op;
  schedule::SumOrder order;
  std::vector<std::vector<uint64_t>> srcs;
  std::vector<uint64_t> expected;
};

uint64_t reduce_in_pairs(DType dtype, ReduceOp op, std::span<const uint64_t> srcs) {
  std::vector<uint64_t> pairs;
  for (size_t s = 0; s < srcs.size(); s += 2) {
    pairs.push_back(reduce_scalars(dtype, op, srcs.subspan(s, 2), 1));
  }
  return reduce_scalars(dtype, op, pairs, 1);
}

uint64_t reduce_scalars_in(const schedule::SumOrder& order, DType dtype, ReduceOp op,
                           std::span<const uint64_t> srcs) {
  if (order.num_shards != 0) return reduce_in_tree(dtype, op, srcs);
  if (order.group_size == 2) return reduce_in_pairs(dtype, op, srcs);
  return reduce_scalars(dtype, op, srcs, static_cast<int>(srcs.size()));
}

ReduceProblem make_problem(DType dtype, ReduceOp op, int num_srcs,
                           const schedule::SumOrder& order = {}) {
  ReduceProblem problem{dtype, op, order, {}, {}};
  for (int s = 0; s < num_srcs; ++s) {
    const auto seed = static_cast<uint64_t>(s) + 100 * static_cast<uint64_t>(op);
    problem.srcs.push_back(random_elems(dtype, kBigLength, seed));
  }
  std::vector<uint64_t> srcs(static_cast<size_t>(num_srcs));
  for (size_t i = 0; i < kBigLength; ++i) {
    for (size_t s = 0; s < srcs.size(); ++s) srcs[s] = problem.srcs[s][i];
    problem.expected.push_back(reduce_scalars_in(order, dtype, op, srcs));
  }
  return problem;
}

// alias: the source that is also dst, or -1.
void run_reduce(const cpu::ElementLoops& table, const ReduceProblem& problem, size_t num_elems,
                int alias) {
  const size_t num_bytes = num_elems * info(problem.dtype).num_bytes;
  std::vector<Bytes> srcs;
  std::vector<const void*> pointers;
  for (size_t s = 0; s < problem.srcs.size(); ++s) {
    srcs.emplace_back(num_bytes, (num_elems + 3 * s) % 64);
    for (size_t i = 0; i < num_elems; ++i) {
      store_bits(problem.dtype, srcs[s].data(), i, problem.srcs[s][i]);
    }
  }
  for (Bytes& src : srcs) pointers.push_back(src.data());
  Bytes separate(num_bytes, 5 * num_elems % 64);
  std::byte* dst = alias < 0 ? separate.data() : srcs[static_cast<size_t>(alias)].data();
  const auto num_srcs = static_cast<int>(srcs.size());
  const schedule::Additions additions(problem.order, num_srcs);
  table.reduce(problem.dtype, problem.op)({pointers.data(), num_srcs, additions.of_ranks()}, dst,
                                          num_elems, num_srcs);
  for (size_t i = 0; i < num_elems; ++i) {
    const uint64_t got = load_bits(problem.dtype, dst, i);
    if (is_same(problem.dtype, got, problem.expected[i])) continue;
    fail(join(table.isa, ' ', name(problem.op), ' ', name(problem.dtype), " of ", srcs.size(),
              " sources, element ", i, " of ", num_elems, ": bits ", got, ", expected ",
              problem.expected[i]));
  }
}

void reduce_loops_give_scalar_bits(DType dtype) {
  for (const cpu::ElementLoops* table : all_tables()) {
    for (size_t op = 0; op < kNumReduceOps; ++op) {
      const auto reduce_op = static_cast<ReduceOp>(op);
      check_equal(table->reduce(dtype, reduce_op) != nullptr, is_defined(reduce_op, dtype),
                  "whether the loop exists");
      if (!is_defined(reduce_op, dtype)) continue;
      for (int num_srcs = 1; num_srcs <= kMaxSrcs; ++num_srcs) {
        const ReduceProblem problem = make_problem(dtype, reduce_op, num_srcs);
        for (size_t num_elems = 0; num_elems <= kMaxLength; ++num_elems) {
          const int alias = static_cast<int>(num_elems) % (num_srcs + 1) - 1;
          run_reduce(*table, problem, num_elems, alias);
        }
        run_reduce(*table, problem, kBigLength, -1);
      }
    }
  }
}

// Dtypes that are their own accumulate dtype, so that scalars may be added in steps.
void reduce_loops_add_in_any_order(DType dtype) {
  for (const cpu::ElementLoops* table : all_tables()) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax}) {
      for (const int num_srcs : {1, 2, 3, 4, 5, 7, 8, 16, kMaxWorldSize}) {
        const auto num_shards = std::bit_ceil(static_cast<uint32_t>(num_srcs));
        const ReduceProblem in_tree = make_problem(dtype, op, num_srcs, {.num_shards = num_shards});
        for (const size_t num_elems : {1, 3, 100, 259}) {
          run_reduce(*table, in_tree, num_elems, num_srcs / 2);
        }
        if (num_srcs % 2 != 0) continue;
        run_reduce(*table, make_problem(dtype, op, num_srcs, {.group_size = 2}), kMaxLength, -1);
      }
    }
  }
}

constexpr DType kFloats[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};

void run_convert(const cpu::ElementLoops& table, DType from, DType to,
                 const std::vector<uint64_t>& elems, size_t misalignment = 0) {
  Bytes src(elems.size() * info(from).num_bytes, misalignment);
  Bytes dst(elems.size() * info(to).num_bytes, misalignment);
  for (size_t i = 0; i < elems.size(); ++i) store_bits(from, src.data(), i, elems[i]);
  table.convert(from, to)(src.data(), dst.data(), elems.size());
  for (size_t i = 0; i < elems.size(); ++i) {
    const uint64_t got = load_bits(to, dst.data(), i);
    const uint64_t expected = round_to(to, to_double(from, elems[i]));
    if (is_same(to, got, expected)) continue;
    fail(join(table.isa, ": ", name(from), " with bits ", elems[i], " becomes ", name(to),
              " with bits ", got, ", expected ", expected));
  }
}

void convert_loops_give_scalar_bits(DType from, DType to) {
  for (const cpu::ElementLoops* table : all_tables()) {
    for (size_t num_elems = 0; num_elems <= kMaxLength; ++num_elems) {
      run_convert(*table, from, to, random_elems(from, num_elems, num_elems), num_elems % 64);
    }
    run_convert(*table, from, to, random_elems(from, 50000, 1));
  }
}

void convert_exists_only_among_floats() {
  for (const cpu::ElementLoops* table : all_tables()) {
    for (size_t from = 0; from < kNumDTypes; ++from) {
      for (size_t to = 0; to < kNumDTypes; ++to) {
        const bool exists = from != to && info(static_cast<DType>(from)).is_floating &&
                            info(static_cast<DType>(to)).is_floating;
        const auto fn = table->convert(static_cast<DType>(from), static_cast<DType>(to));
        check_equal(fn != nullptr, exists, "whether the loop exists");
      }
    }
  }
}

// For every two neighbours in `to`: the tie between them and the values next to the tie in `from`.
// In float64 a detour through float32 would round these values wrongly.
void ties_round_to_even(DType from, DType to) {
  const uint64_t infinity = round_to(to, INFINITY);
  const uint64_t stride = infinity > (1 << 16) ? 49999 : 1;  // not each of 2^32
  std::vector<uint64_t> elems;
  for (uint64_t bits = 0; bits < infinity; bits += stride) {
    // After the largest finite value, uses the value that would come next.
    const double low = to_double(to, bits);
    const double high =
        bits + 1 < infinity ? to_double(to, bits + 1) : 2 * low - to_double(to, bits - 1);
    const uint64_t tie = round_to(from, low + (high - low) / 2);
    for (const uint64_t near : {tie - 1, tie, tie + 1, round_to(from, low), round_to(from, high)}) {
      elems.push_back(near);
      elems.push_back(near | round_to(from, -0.0));
    }
  }
  for (const cpu::ElementLoops* table : all_tables()) run_convert(*table, from, to, elems);
}

// Of a half each of the 65536 values, to each other format.
void all_casts_of(DType from) {
  std::vector<uint64_t> all(info(from).num_bytes == 2 ? 1 << 16 : 0);
  for (size_t bits = 0; bits < all.size(); ++bits) all[bits] = bits;
  for (const DType to : kFloats) {
    if (to == from) continue;
    convert_loops_give_scalar_bits(from, to);
    for (const cpu::ElementLoops* table : all_tables()) run_convert(*table, from, to, all);
  }
}

// Longer than any cache.
const cpu::OutputCopier kStreaming(uint64_t{1} << 40, 1);

void streamed_outputs_equal_their_sources() {
  for (size_t num_bytes = 0; num_bytes <= 3 * kCacheLineBytes; ++num_bytes) {
    for (size_t misalignment = 0; misalignment < kCacheLineBytes; misalignment += 7) {
      Bytes src(num_bytes, 64 - misalignment);
      Bytes dst(num_bytes, misalignment);
      for (size_t i = 0; i < num_bytes; ++i) src.data()[i] = static_cast<std::byte>(i + 1);
      kStreaming.copy(dst.data(), src.data(), num_bytes);
      check(std::equal(src.data(), src.data() + num_bytes, dst.data()),
            join("streamed ", num_bytes, " bytes to an offset of ", misalignment));
    }
  }
}

const CaseTable kCases{
    {"loops_stream", streamed_outputs_equal_their_sources},
    {"loops_reduce-float32", reduce_loops_give_scalar_bits, DType::kFloat32},
    {"loops_reduce-float64", reduce_loops_give_scalar_bits, DType::kFloat64},
    {"loops_reduce-float16", reduce_loops_give_scalar_bits, DType::kFloat16},
    {"loops_reduce-bfloat16", reduce_loops_give_scalar_bits, DType::kBFloat16},
    {"loops_reduce-uint8", reduce_loops_give_scalar_bits, DType::kUInt8},
    {"loops_reduce-int8", reduce_loops_give_scalar_bits, DType::kInt8},
    {"loops_reduce-int16", reduce_loops_give_scalar_bits, DType::kInt16},
    {"loops_reduce-int32", reduce_loops_give_scalar_bits, DType::kInt32},
    {"loops_reduce-int64", reduce_loops_give_scalar_bits, DType::kInt64},
    {"loops_reduce-bool", reduce_loops_give_scalar_bits, DType::kBool},
    {"loops_order-float32", reduce_loops_add_in_any_order, DType::kFloat32},
    {"loops_order-float64", reduce_loops_add_in_any_order, DType::kFloat64},
    {"loops_order-int32", reduce_loops_add_in_any_order, DType::kInt32},
    {"loops_convert-float32", all_casts_of, DType::kFloat32},
    {"loops_convert-float64", all_casts_of, DType::kFloat64},
    {"loops_convert-float16", all_casts_of, DType::kFloat16},
    {"loops_convert-bfloat16", all_casts_of, DType::kBFloat16},
    {"loops_convert_only_floats", convert_exists_only_among_floats},
    {"loops_ties-float32-float16", ties_round_to_even, DType::kFloat32, DType::kFloat16},
    {"loops_ties-float32-bfloat16", ties_round_to_even, DType::kFloat32, DType::kBFloat16},
    {"loops_ties-float64-float32", ties_round_to_even, DType::kFloat64, DType::kFloat32},
    {"loops_ties-float64-float16", ties_round_to_even, DType::kFloat64, DType::kFloat16},
    {"loops_ties-float64-bfloat16", ties_round_to_even, DType::kFloat64, DType::kBFloat16},
};

}  // namespace
}  // namespace rota::test
