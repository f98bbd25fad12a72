// The element loops, compiled once for each instruction set by the files that include this one.
// ROTA_ISA_NAMESPACE names the table, ROTA_VECTOR_BYTES is the register width: 64 for AVX-512, 32
// for AVX2 with F16C, 16 elsewhere (the target pragma does not define the compiler's own macros in
// C++). Arithmetic is written with the compiler's generic vectors, so only the conversions of
// float16 name an instruction.
//
// Includes nothing and calls no library template: see the comment in element_loops_avx2.cpp.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

constexpr size_t kVectorBytes = ROTA_VECTOR_BYTES;

// Independent accumulators that hide the latency of loads and additions; 4 fill the load ports,
// more gained nothing.
constexpr size_t kUnroll = 4;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

// The same number of lanes as a Vec<float>, of narrower elements.
typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint8_t ByteBits __attribute__((vector_size(kVectorBytes / 4)));

template <typename V>
V load_bytes(const void* src) {
  V value;
  __builtin_memcpy(&value, src, sizeof(value));
  return value;
}
template <typename V>
void store_bytes(void* dst, V value) {
  __builtin_memcpy(dst, &value, sizeof(value));
}

template <typename V>
V broadcast(decltype(V{}[0] + 0) value) {
  return V{} + static_cast<__typeof__(V{}[0])>(value);
}

// ---- float16

#if ROTA_VECTOR_BYTES == 64
// The forms with a mask, all set: g++ 12 warns about its own header otherwise (GCC bug 105593).
Vec<float> widen_half(HalfBits bits) { return _mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
HalfBits narrow_half(Vec<float> value) {
  return (HalfBits)_mm512_maskz_cvtps_ph(0xffff, value,
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif ROTA_VECTOR_BYTES == 32
Vec<float> widen_half(HalfBits bits) { return _mm256_cvtph_ps((__m128i)bits); }
HalfBits narrow_half(Vec<float> value) {
  return (HalfBits)_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
Vec<float> widen_half(HalfBits bits) {
  Vec<float> value;
  for (size_t i = 0; i < kVectorBytes / 4; ++i) {
    value[i] = static_cast<float>(__builtin_bit_cast(_Float16, bits[i]));
  }
  return value;
}
HalfBits narrow_half(Vec<float> value) {
  HalfBits bits;
  for (size_t i = 0; i < kVectorBytes / 4; ++i) {
    bits[i] = __builtin_bit_cast(uint16_t, static_cast<_Float16>(value[i]));
  }
  return bits;
}
#endif

// ---- bfloat16: the upper half of a float32

Vec<float> widen_bfloat(HalfBits bits) {
  return (Vec<float>)(__builtin_convertvector(bits, Vec<uint32_t>) << 16);
}
HalfBits narrow_bfloat(Vec<float> value) {
  const auto bits = (Vec<uint32_t>)value;
  // Round to nearest even by carry: add just under half a unit, and one more if the result is odd.
  const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // A NaN must not be carried into Inf: keep its top bits and make it quiet.
  const auto quiet = (bits >> 16) | 0x40;
  const auto is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return __builtin_convertvector(is_nan ? quiet : rounded, HalfBits);
}

// ---- float8: of 5 exponent bits, the upper half of a float16; of 4, without Inf

Vec<float> widen_e5m2(ByteBits bits) {
  return widen_half(__builtin_convertvector(bits, HalfBits) << 8);
}
Vec<float> widen_e4m3(ByteBits bits) {
  const auto wide = __builtin_convertvector(bits, Vec<uint32_t>);
  const auto magnitude = wide & 0x7f;
  const auto normal = (magnitude << 20) + ((127 - 7) << 23);
  const auto denormal =
      (Vec<uint32_t>)(__builtin_convertvector((Vec<int32_t>)magnitude, Vec<float>) * 0x1p-9f);
  const auto nan = Vec<uint32_t>{} + 0x7fc00000;
  const auto value = magnitude < 8 ? denormal : (magnitude == 0x7f ? nan : normal);
  return (Vec<float>)(value | ((wide & 0x80) << 24));
}

// kBias: of the exponent; kTooLarge: what magnitudes that round beyond the largest finite become.
template <int kMantissaBits, uint32_t kBias, uint32_t kMaxFinite, uint32_t kTooLarge>
ByteBits narrow_to_byte(Vec<float> value) {
  constexpr int kDropped = 23 - kMantissaBits;
  const auto bits = (Vec<uint32_t>)value;
  const auto magnitude = bits & 0x7fffffff;
  // Round to nearest even by carry, as for bfloat16.
  const auto carried = magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1);
  const auto normal = (carried >> kDropped) - ((127 - kBias) << kMantissaBits);
  // Below the smallest normal number an addition rounds: its sum's last place is this format's.
  constexpr uint32_t kShifter = (127 - kBias + kDropped + 1) << 23;
  const auto shifter = (Vec<float>)(Vec<uint32_t>{} + kShifter);
  const auto denormal = (Vec<uint32_t>)((Vec<float>)magnitude + shifter) - kShifter;
  const auto is_denormal = magnitude < ((127 - kBias + 1) << 23);
  const auto rounded = is_denormal ? denormal : normal;
  const auto finite = rounded > kMaxFinite ? Vec<uint32_t>{} + kTooLarge : rounded;
  const auto result = magnitude > 0x7f800000 ? Vec<uint32_t>{} + 0x7f : finite;
  return __builtin_convertvector(result | ((bits >> 24) & 0x80), ByteBits);
}
ByteBits narrow_e5m2(Vec<float> value) { return narrow_to_byte<2, 15, 0x7b, 0x7c>(value); }
ByteBits narrow_e4m3(Vec<float> value) { return narrow_to_byte<3, 7, 0x7e, 0x7f>(value); }

// ---- how each dtype is loaded, accumulated and stored

template <typename T>
struct PlainLanes {
  using Acc = Vec<T>;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(T);
  static constexpr size_t kElemBytes = sizeof(T);
  static Acc load(const void* src) { return load_bytes<Acc>(src); }
  static void store(void* dst, Acc value) { store_bytes(dst, value); }
};

template <typename Bits, Vec<float> (*widen)(Bits), Bits (*narrow)(Vec<float>)>
struct NarrowLanes {
  using Acc = Vec<float>;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  static constexpr size_t kElemBytes = sizeof(Bits) / kNumLanes;
  static Acc load(const void* src) { return widen(load_bytes<Bits>(src)); }
  static void store(void* dst, Acc value) { store_bytes(dst, narrow(value)); }
};

// Any byte but 0 is true, as torch reads it; what is written is 0 or 1.
struct BoolLanes : PlainLanes<uint8_t> {
  static Acc load(const void* src) { return (Acc)(load_bytes<Acc>(src) != 0) & 1; }
};

template <DType dtype>
struct LanesOf;
template <>
struct LanesOf<DType::kFloat32> : PlainLanes<float> {};
template <>
struct LanesOf<DType::kFloat64> : PlainLanes<double> {};
template <>
struct LanesOf<DType::kFloat16> : NarrowLanes<HalfBits, widen_half, narrow_half> {};
template <>
struct LanesOf<DType::kBFloat16> : NarrowLanes<HalfBits, widen_bfloat, narrow_bfloat> {};
template <>
struct LanesOf<DType::kFloat8E4M3> : NarrowLanes<ByteBits, widen_e4m3, narrow_e4m3> {};
template <>
struct LanesOf<DType::kFloat8E5M2> : NarrowLanes<ByteBits, widen_e5m2, narrow_e5m2> {};
template <>
struct LanesOf<DType::kUInt8> : PlainLanes<uint8_t> {};
template <>
struct LanesOf<DType::kInt8> : PlainLanes<int8_t> {};
template <>
struct LanesOf<DType::kInt16> : PlainLanes<int16_t> {};
template <>
struct LanesOf<DType::kInt32> : PlainLanes<int32_t> {};
template <>
struct LanesOf<DType::kInt64> : PlainLanes<int64_t> {};
template <>
struct LanesOf<DType::kBool> : BoolLanes {};

// ---- reduce

// Integer sums wrap because the file is compiled with -fwrapv. A comparison with NaN is false, so
// the second test lets a NaN of either side through, as torch does.
template <DType dtype, ReduceOp op, typename V>
V combine(V a, V b) {
  constexpr bool is_bool = dtype == DType::kBool;
  if constexpr (op == ReduceOp::kMin) return (a < b) | (a != a) ? a : b;
  if constexpr (op == ReduceOp::kMax) return (a > b) | (a != a) ? a : b;
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (op == ReduceOp::kBand) return a & b;
  if constexpr (op == ReduceOp::kBor || (op == ReduceOp::kSum && is_bool)) return a | b;
  if constexpr (op == ReduceOp::kBxor) return a ^ b;
  if constexpr (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
}

// What turns a sum into a result. Function objects rather than lambdas, because the target pragma
// of the including file does not reach lambdas inside templates.
template <typename Acc>
struct Keep {
  Acc operator()(Acc sum) const { return sum; }
};
template <typename Acc>
struct MultiplyBy {
  Acc factor;
  Acc operator()(Acc sum) const { return sum * factor; }
};
template <typename Acc>
struct DivideBy {
  Acc divisor;
  Acc operator()(Acc sum) const { return sum / divisor; }
};

template <typename Lanes>
typename Lanes::Acc load_part(const char* src, size_t num_lanes) {
  alignas(kVectorBytes) char lanes[kVectorBytes] = {};
  __builtin_memcpy(lanes, src, num_lanes * Lanes::kElemBytes);
  return Lanes::load(lanes);
}

// Sums left to right, one vector of the accumulate dtype at a time.
template <DType dtype, ReduceOp op, typename Finish>
void reduce_with(const void* const* srcs, int num_srcs, void* dst, size_t num_elems,
                 const Finish& finish) {
  using Lanes = LanesOf<dtype>;
  using Acc = typename Lanes::Acc;
  const auto src = [&](int index, size_t elem) {
    return static_cast<const char*>(srcs[index]) + elem * Lanes::kElemBytes;
  };

  constexpr size_t kBlock = kUnroll * Lanes::kNumLanes;
  size_t elem = 0;
  for (; elem + kBlock <= num_elems; elem += kBlock) {
    Acc acc[kUnroll];
    for (size_t u = 0; u < kUnroll; ++u) acc[u] = Lanes::load(src(0, elem + u * Lanes::kNumLanes));
    for (int s = 1; s < num_srcs; ++s) {
      for (size_t u = 0; u < kUnroll; ++u) {
        acc[u] = combine<dtype, op>(acc[u], Lanes::load(src(s, elem + u * Lanes::kNumLanes)));
      }
    }
    for (size_t u = 0; u < kUnroll; ++u) {
      Lanes::store(static_cast<char*>(dst) + (elem + u * Lanes::kNumLanes) * Lanes::kElemBytes,
                   finish(acc[u]));
    }
  }
  // The rest, a vector at a time through a padded copy: the arithmetic must be the vectors' own.
  while (elem < num_elems) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < Lanes::kNumLanes ? rest : Lanes::kNumLanes;
    Acc acc = load_part<Lanes>(src(0, elem), num_lanes);
    for (int s = 1; s < num_srcs; ++s) {
      acc = combine<dtype, op>(acc, load_part<Lanes>(src(s, elem), num_lanes));
    }
    alignas(kVectorBytes) char lanes[kVectorBytes];
    Lanes::store(lanes, finish(acc));
    __builtin_memcpy(static_cast<char*>(dst) + elem * Lanes::kElemBytes, lanes,
                     num_lanes * Lanes::kElemBytes);
    elem += num_lanes;
  }
}

template <DType dtype, ReduceOp op>
void reduce(const void* const* srcs, int num_srcs, void* dst, size_t num_elems, int divisor) {
  using Acc = typename LanesOf<dtype>::Acc;
  if constexpr (op != ReduceOp::kAvg) {
    reduce_with<dtype, op>(srcs, num_srcs, dst, num_elems, Keep<Acc>{});
  } else if ((divisor & (divisor - 1)) == 0) {
    // The reciprocal of a power of two is exact, so the product rounds as the quotient would; a
    // division takes as long as reading the sources (64 KiB, 2 ranks: 10.2 instead of 6.5 us).
    reduce_with<dtype, op>(srcs, num_srcs, dst, num_elems,
                           MultiplyBy<Acc>{1 / broadcast<Acc>(divisor)});
  } else {
    reduce_with<dtype, op>(srcs, num_srcs, dst, num_elems, DivideBy<Acc>{broadcast<Acc>(divisor)});
  }
}

// ---- convert

// Among floats of 32 bits and fewer, by way of float32: exact on the way up, one rounding down.
template <DType from, DType to>
void convert(const void* src, void* dst, size_t num_elems) {
  using From = LanesOf<from>;
  using To = LanesOf<to>;
  constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  size_t elem = 0;
  for (; elem + kNumLanes <= num_elems; elem += kNumLanes) {
    To::store(out + elem * To::kElemBytes, From::load(in + elem * From::kElemBytes));
  }
  if (elem < num_elems) {
    alignas(kVectorBytes) char lanes[kVectorBytes] = {};
    __builtin_memcpy(lanes, in + elem * From::kElemBytes, (num_elems - elem) * From::kElemBytes);
    alignas(kVectorBytes) char rounded[kVectorBytes];
    To::store(rounded, From::load(lanes));
    __builtin_memcpy(out + elem * To::kElemBytes, rounded, (num_elems - elem) * To::kElemBytes);
  }
}

// float64 to float32 "rounded to odd": inexact results get an odd last bit, so that a second
// rounding to 16 or 8 bits sees which side of a tie the float64 lay on (Boldo & Melquiond 2008).
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
  if (bits & 1) return nearest;
  const bool is_above = nearest > value;  // step back towards value, away from the even neighbour
  const bool is_negative = bits >> 31;
  bits += is_above == is_negative ? 1 : -1;
  return __builtin_bit_cast(float, bits);
}

template <DType to>
void convert_from_double(const void* src, void* dst, size_t num_elems) {
  constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  for (size_t elem = 0; elem < num_elems; elem += kNumLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < kNumLanes ? rest : kNumLanes;
    float lanes[kNumLanes] = {};
    for (size_t i = 0; i < num_lanes; ++i) {
      const auto value = load_bytes<double>(in + (elem + i) * sizeof(double));
      lanes[i] = to == DType::kFloat32 ? static_cast<float>(value) : round_to_odd(value);
    }
    convert<DType::kFloat32, to>(lanes, out + elem * LanesOf<to>::kElemBytes, num_lanes);
  }
}

template <DType from>
void convert_to_double(const void* src, void* dst, size_t num_elems) {
  constexpr size_t kNumLanes = kVectorBytes / sizeof(float);
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  for (size_t elem = 0; elem < num_elems; elem += kNumLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < kNumLanes ? rest : kNumLanes;
    float lanes[kNumLanes];
    convert<from, DType::kFloat32>(in + elem * LanesOf<from>::kElemBytes, lanes, num_lanes);
    for (size_t i = 0; i < num_lanes; ++i) {
      store_bytes(out + (elem + i) * sizeof(double), static_cast<double>(lanes[i]));
    }
  }
}

// ---- the table

template <DType dtype, ReduceOp op>
constexpr ReduceFn reduce_entry() {
  if constexpr (is_defined(op, dtype)) {
    return reduce<dtype, op>;
  } else {
    return nullptr;
  }
}

template <DType from, DType to>
constexpr ConvertFn convert_entry() {
  if constexpr (!info(from).is_floating || !info(to).is_floating || from == to) {
    return nullptr;
  } else if constexpr (from == DType::kFloat64) {
    return convert_from_double<to>;
  } else if constexpr (to == DType::kFloat64) {
    return convert_to_double<from>;
  } else {
    return convert<from, to>;
  }
}

template <size_t dtype, size_t... ops>
constexpr void fill_reduce(ElementLoops& table, std::index_sequence<ops...>) {
  ((table.reduce_fns[dtype][ops] =
        reduce_entry<static_cast<DType>(dtype), static_cast<ReduceOp>(ops)>()),
   ...);
}
template <size_t from, size_t... tos>
constexpr void fill_convert(ElementLoops& table, std::index_sequence<tos...>) {
  ((table.convert_fns[from][tos] =
        convert_entry<static_cast<DType>(from), static_cast<DType>(tos)>()),
   ...);
}
template <size_t... dtypes>
constexpr ElementLoops make_table(std::string_view isa, std::index_sequence<dtypes...>) {
  ElementLoops table{isa, {}, {}};
  (fill_reduce<dtypes>(table, std::make_index_sequence<kNumReduceOps>{}), ...);
  (fill_convert<dtypes>(table, std::make_index_sequence<kNumDTypes>{}), ...);
  return table;
}

}  // namespace

#define ROTA_STRING_OF(name) #name
#define ROTA_STRING(name) ROTA_STRING_OF(name)
extern constexpr ElementLoops kTable =
    make_table(ROTA_STRING(ROTA_ISA_NAMESPACE), std::make_index_sequence<kNumDTypes>{});

}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
