// How single elements of the wire format are rounded, beyond what lanes.inl does for tensors: Inf
// in scaled float8_e4m3fn, a shorter way for what is known to be finite, and rounding at random.
// Included by the file of each instruction set after lanes.inl; what is said in element_loops.inl
// holds here too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

Vec<uint32_t> larger_of(Vec<uint32_t> a, Vec<uint32_t> b) { return a > b ? a : b; }

// ---- float8_e4m3fn in scaled blocks: its largest code is free, and stands for Inf

constexpr uint16_t kScaledE4M3Inf = 0x7e;
Vec<float> widen_scaled_e4m3(ByteBits bits) {
  const auto wide = __builtin_convertvector(bits, HalfBits);
  const auto half = ((wide & 0x80) << 8) | ((wide & 0x7f) << 7);
  // From kScaledE4M3Inf on: float16's Inf, and one beyond, which is NaN.
  const auto special = ((wide & 0x80) << 8) | (0x7c00 + (wide & 0x7f) - kScaledE4M3Inf);
  return widen_half((wide & 0x7f) >= kScaledE4M3Inf ? special : half) * 256.0f;
}
ByteBits narrow_scaled_e4m3(Vec<float> value) {
  return narrow_to<ByteBits, 3, 7, kScaledE4M3Inf - 1, kScaledE4M3Inf, 0x7f>(value);
}

template <DType dtype, bool is_scaled>
struct WireLanes : LanesOf<dtype> {};
template <>
struct WireLanes<DType::kFloat8E4M3, true>
    : NarrowLanes<ByteBits, widen_scaled_e4m3, narrow_scaled_e4m3> {};

// ---- finite numbers of scaled blocks to float8, which takes half of what narrow_to does

#if ROTA_VECTOR_BYTES > 16
// To this many places by an addition: its sum's last place is theirs. kBias as of narrow_to.
template <int kMantissaBits, uint32_t kBias>
Vec<float> round_places(Vec<float> value) {
  const auto bits = (Vec<uint32_t>)value;
  const auto exponent = larger_of(bits & 0x7f800000, Vec<uint32_t>{} + ((127 - kBias + 1) << 23));
  const auto sign = bits & 0x80000000;
  const auto shifter = (Vec<float>)((exponent + ((23 - kMantissaBits) << 23)) | sign);
  return (Vec<float>)((Vec<uint32_t>)((value + shifter) - shifter) | sign);  // also that of zeros
}
// Exact from here on: by way of float16, which has the same fields or longer ones.
ByteBits narrow_finite_e5m2(Vec<float> value) {
  return __builtin_convertvector(narrow_half(round_places<2, 15>(value)) >> 8, ByteBits);
}
ByteBits narrow_finite_e4m3(Vec<float> value) {
  const auto half = narrow_half(round_places<3, 7>(value) * 0x1p-8f);
  return __builtin_convertvector((half >> 7) | ((half >> 8) & 0x80), ByteBits);
}
#else
ByteBits narrow_finite_e5m2(Vec<float> value) { return narrow_e5m2(value); }
ByteBits narrow_finite_e4m3(Vec<float> value) { return narrow_scaled_e4m3(value); }
#endif

// ---- stochastic rounding

// Wellons's lowbias32 of a counter: every bit of the result depends on every bit of the counter.
Vec<uint32_t> random_of(Vec<uint32_t> counter) {
  counter = (counter ^ (counter >> 16)) * 0x21f0aaad;
  counter = (counter ^ (counter >> 15)) * 0x735a2d97;
  return counter ^ (counter >> 15);
}

// To one of the two neighbours, the nearer the likelier: a random fraction of the last place is
// added, and what lies below the last place cut off. Parameters as of narrow_to.
template <typename Bits, int kMantissaBits, uint32_t kBias, uint32_t kMaxFinite, uint32_t kTooLarge,
          uint32_t kNan>
Bits narrow_stochastically(Vec<float> value, Vec<uint32_t> random) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Bits) / kFloatLanes);
  const auto bits = (Vec<uint32_t>)value;
  const auto magnitude = bits & 0x7fffffff;
  const auto fraction = random >> (32 - kDropped);
  auto rounded = ((magnitude + fraction) >> kDropped) - ((127 - kBias) << kMantissaBits);
  if constexpr (kBias < 127) {
    // Below the smallest normal number, in fixed point: units of the last place, times 2^kDropped.
    constexpr uint32_t kMinNormal = (127 - kBias + 1) << 23;
    constexpr uint32_t kUnit = (127 + kBias + 22) << 23;
    const auto is_denormal = magnitude < kMinNormal;
    const auto small = (Vec<float>)(is_denormal ? magnitude : Vec<uint32_t>{});
    const auto units =
        __builtin_convertvector(small * (Vec<float>)(Vec<uint32_t>{} + kUnit), Vec<int32_t>);
    rounded = is_denormal ? ((Vec<uint32_t>)units + fraction) >> kDropped : rounded;
  }
  const auto finite = rounded > kMaxFinite ? Vec<uint32_t>{} + kTooLarge : rounded;
  const auto result = magnitude > 0x7f800000 ? Vec<uint32_t>{} + kNan : finite;
  constexpr uint32_t kSign = 0x80000000u >> kSignShift;
  return __builtin_convertvector(result | ((bits >> kSignShift) & kSign), Bits);
}

template <DType dtype, bool is_scaled>
auto narrow_at_random(Vec<float> value, Vec<uint32_t> random) {
  if constexpr (dtype == DType::kFloat16) {
    return narrow_stochastically<HalfBits, 10, 15, 0x7bff, 0x7c00, 0x7e00>(value, random);
  } else if constexpr (dtype == DType::kBFloat16) {
    return narrow_stochastically<HalfBits, 7, 127, 0x7f7f, 0x7f80, 0x7fc0>(value, random);
  } else if constexpr (dtype == DType::kFloat8E5M2) {
    return narrow_stochastically<ByteBits, 2, 15, 0x7b, 0x7c, 0x7f>(value, random);
  } else if constexpr (is_scaled) {
    return narrow_stochastically<ByteBits, 3, 7, kScaledE4M3Inf - 1, kScaledE4M3Inf, 0x7f>(value,
                                                                                           random);
  } else {
    return narrow_stochastically<ByteBits, 3, 7, 0x7e, 0x7f, 0x7f>(value, random);
  }
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
