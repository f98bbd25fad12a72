// Vectors of one instruction set, and how each dtype is loaded into them, accumulated and stored.
// Included by the file of each instruction set before element_loops.inl; what is said there holds
// here too.

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

// ---- rounding float32 to narrower floats, to nearest, ties to even

// kBias: of the exponent; kTooLarge: what magnitudes that round beyond the largest finite become.
template <typename Bits, int kMantissaBits, uint32_t kBias, uint32_t kMaxFinite, uint32_t kTooLarge,
          uint32_t kNan>
Bits narrow_to(Vec<float> value) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Bits) / kFloatLanes);
  const auto bits = (Vec<uint32_t>)value;
  const auto magnitude = bits & 0x7fffffff;
  // By carry: add just under half a unit, and one more if the result is odd.
  const auto carried = magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1);
  const auto normal = (carried >> kDropped) - ((127 - kBias) << kMantissaBits);
  // Below the smallest normal number an addition rounds: its sum's last place is this format's.
  constexpr uint32_t kShifter = (127 - kBias + kDropped + 1) << 23;
  const auto shifter = (Vec<float>)(Vec<uint32_t>{} + kShifter);
  const auto denormal = (Vec<uint32_t>)((Vec<float>)magnitude + shifter) - kShifter;
  const auto is_denormal = magnitude < ((127 - kBias + 1) << 23);
  const auto rounded = is_denormal ? denormal : normal;
  const auto finite = rounded > kMaxFinite ? Vec<uint32_t>{} + kTooLarge : rounded;
  const auto result = magnitude > 0x7f800000 ? Vec<uint32_t>{} + kNan : finite;
  constexpr uint32_t kSign = 0x80000000u >> kSignShift;
  return __builtin_convertvector(result | ((bits >> kSignShift) & kSign), Bits);
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
  const auto wide = __builtin_convertvector(bits, Vec<uint32_t>);
  const auto magnitude = wide & 0x7fff;
  // With float32's exponent field the number is 2^112 times too small, denormals included.
  const auto finite = (Vec<uint32_t>)((Vec<float>)(magnitude << 13) * 0x1p112f);
  const auto value = magnitude < 0x7c00 ? finite : (magnitude << 13) | 0x7f800000;
  return (Vec<float>)(value | ((wide & 0x8000) << 16));
}
HalfBits narrow_half(Vec<float> value) {
  return narrow_to<HalfBits, 10, 15, 0x7bff, 0x7c00, 0x7e00>(value);
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
  const auto wide = __builtin_convertvector(bits, HalfBits);
  // With float16's exponent field the number is 2^8 times too small; the largest code is NaN.
  const auto half = ((wide & 0x80) << 8) | ((wide & 0x7f) << 7);
  const auto nan = HalfBits{} + 0x7e00;
  return widen_half((wide & 0x7f) == 0x7f ? nan : half) * 256.0f;
}
ByteBits narrow_e5m2(Vec<float> value) {
  return narrow_to<ByteBits, 2, 15, 0x7b, 0x7c, 0x7f>(value);
}
ByteBits narrow_e4m3(Vec<float> value) {
  return narrow_to<ByteBits, 3, 7, 0x7e, 0x7f, 0x7f>(value);
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

template <typename Bits, Vec<float> (*widen)(Bits), Bits (*narrow)(Vec<float>)>
struct NarrowLanes {
  using Acc = Vec<float>;
  static constexpr size_t kNumLanes = kFloatLanes;
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

template <typename Lanes>
typename Lanes::Acc load_part(const char* src, size_t num_lanes) {
  alignas(kVectorBytes) char lanes[kVectorBytes] = {};
  __builtin_memcpy(lanes, src, num_lanes * Lanes::kElemBytes);
  return Lanes::load(lanes);
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
