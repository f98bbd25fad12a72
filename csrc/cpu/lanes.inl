// Vectors of one instruction set, and how each dtype is loaded into them, accumulated and stored.
// Included by element_loops.inl, whose opening comment applies here too.

// Unlike all other headers, these are included below the target pragma: GCC 12 splits comparisons
// of vectors wider than the target's registers, even when it inlines them later (up to 25 times
// as slow). All their functions are always inlined, and the headers that they include were included
// before; so was base/limits.h.
#include "base/block_scale.h"
#include "base/combine.h"
#include "base/float_bits.h"
#include "base/random_bits.h"

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

constexpr size_t kVectorBytes = ROTA_VECTOR_BYTES;
constexpr size_t kFloatLanes = kVectorBytes / sizeof(float);

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

// ---- narrow floats: base/float_bits.h, or the CPU's instruction for float16

template <FloatFormat format, typename Bits>
Bits narrow_bits(Vec<float> value) {
  return __builtin_convertvector(narrow_to_nearest<format, Vec<uint32_t>>(value), Bits);
}
template <FloatFormat format>
Vec<float> widen_bits(HalfBits bits) {
  return widen<format, Vec<float>>(__builtin_convertvector(bits, Vec<uint32_t>));
}

#if ROTA_VECTOR_BYTES == 64
// The masked forms, with all bits set: with the plain ones g++ 12 warns about its own header (GCC
// bug 105593).
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
constexpr auto widen_half = widen_bits<float_format(DType::kFloat16)>;
constexpr auto narrow_half = narrow_bits<float_format(DType::kFloat16), HalfBits>;
#endif

template <FloatFormat format>
Vec<float> widen_bits(ByteBits bits) {
  constexpr float kFactor = float16_factor(format);
  return widen_half(float16_of<format>(__builtin_convertvector(bits, HalfBits))) * kFactor;
}

// ---- how each dtype is loaded, accumulated and stored

template <typename T>
struct PlainLanes {
  using Acc = Vec<T>;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(T);
  static constexpr size_t kElemBytes = sizeof(T);
  static Acc load(const void* src) { return load_bytes<Acc>(src); }
  static void store(void* dst, Acc value) { store_bytes(dst, value); }
};

template <typename B, Vec<float> (*kWiden)(B), B (*kNarrow)(Vec<float>)>
struct NarrowLanes {
  using Acc = Vec<float>;
  using Bits = B;
  static constexpr size_t kNumLanes = kFloatLanes;
  static constexpr size_t kElemBytes = sizeof(Bits) / kNumLanes;
  static Acc load(const void* src) { return kWiden(load_bytes<Bits>(src)); }
  static void store(void* dst, Acc value) { store_bytes(dst, kNarrow(value)); }
};

template <FloatFormat format, typename Bits>
using GenericLanes = NarrowLanes<Bits, widen_bits<format>, narrow_bits<format, Bits>>;

// Any nonzero byte is true, as in torch; stores write 0 or 1.
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
struct LanesOf<DType::kBFloat16> : GenericLanes<float_format(DType::kBFloat16), HalfBits> {};
template <>
struct LanesOf<DType::kFloat8E4M3> : GenericLanes<float_format(DType::kFloat8E4M3), ByteBits> {};
template <>
struct LanesOf<DType::kFloat8E5M2> : GenericLanes<float_format(DType::kFloat8E5M2), ByteBits> {};
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

template <typename Lanes>
typename Lanes::Acc load_part(const char* src, size_t num_lanes) {
  alignas(kVectorBytes) char lanes[kVectorBytes] = {};
  __builtin_memcpy(lanes, src, num_lanes * Lanes::kElemBytes);
  return Lanes::load(lanes);
}

// The orders in which kVecs vectors of each source are summed, which `elements` loads and adds. Two
// types, so that the loop over the elements of a sum in turn knows no other order: 7 % of the time
// of 64 MiB on 2 ranks.
struct InTurn {
  int num_sources;

  template <typename Elements, typename V, size_t kVecs>
  inline __attribute__((always_inline)) void sum_up(const Elements& elements,
                                                    V (&sums)[kVecs]) const {
    elements.load(0, sums);
    for (int s = 1; s < num_sources; ++s) {
      V values[kVecs];
      elements.load(s, values);
      for (size_t v = 0; v < kVecs; ++v) sums[v] = Elements::add(sums[v], values[v]);
    }
  }
};
struct InTree {
  int num_sources;
  const uint8_t* num_additions;

  template <typename Elements, typename V, size_t kVecs>
  inline __attribute__((always_inline)) void sum_up(const Elements& elements,
                                                    V (&sums)[kVecs]) const {
    elements.load(0, sums);
    V pending[kMostSums - 1][kVecs];
    int num_pending = 0;
    for (int s = 1; s < num_sources; ++s) {
      for (size_t v = 0; v < kVecs; ++v) pending[num_pending][v] = sums[v];
      ++num_pending;
      elements.load(s, sums);
      for (int i = num_additions[s]; i > 0; --i) {
        --num_pending;
        for (size_t v = 0; v < kVecs; ++v) {
          sums[v] = Elements::add(pending[num_pending][v], sums[v]);
        }
      }
    }
  }
};

template <typename Elements, typename Source, typename V, size_t kVecs>
inline __attribute__((always_inline)) void sum_up(const Elements& elements,
                                                  const Summands<Source>& summands,
                                                  V (&sums)[kVecs]) {
  if (summands.num_additions == nullptr) {
    InTurn{summands.num}.sum_up(elements, sums);
  } else {
    InTree{summands.num, summands.num_additions}.sum_up(elements, sums);
  }
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
