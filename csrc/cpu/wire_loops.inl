// The wire loops: float32 into the wire format (base/wire_format.h) and back, sums of what several
// ranks sent, and the squares of a result. Included by the file of each instruction set after
// lanes.inl; what is said in element_loops.inl holds here too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

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

// How encoded elements are rounded and stored. `elem` counts from the start of the loop.
template <DType dtype, bool is_scaled>
struct ToNearest {
  void store(char* dst, Vec<float> value, size_t) const {
    WireLanes<dtype, is_scaled>::store(dst, value);
  }
};
template <DType dtype, bool is_scaled>
struct AtRandom {
  uint32_t key;
  void store(char* dst, Vec<float> value, size_t elem) const {
    if constexpr (dtype == DType::kFloat32) {
      store_bytes(dst, value);
    } else {
      Vec<uint32_t> counter;
      for (size_t i = 0; i < kFloatLanes; ++i) counter[i] = static_cast<uint32_t>(i);
      const auto random = random_of(counter + (key + static_cast<uint32_t>(elem)));
      store_bytes(dst, narrow_at_random<dtype, is_scaled>(value, random));
    }
  }
};

// ---- blocks and their scales

// Elements that share a scale; without scales, as many as a loop takes at a time.
template <DType dtype, bool is_scaled>
constexpr size_t kBlockElems = is_scaled ? block_scaling(dtype).block_elems : 64;

template <size_t kShift, size_t... kLanes>
Vec<uint32_t> rotate_lanes(Vec<uint32_t> value, std::index_sequence<kLanes...>) {
  return __builtin_shufflevector(value, value, ((kLanes + kShift) % kFloatLanes)...);
}

// The largest lane, in every lane.
template <size_t kShift = kFloatLanes / 2>
Vec<uint32_t> largest_lane(Vec<uint32_t> value) {
  const auto rotated = rotate_lanes<kShift>(value, std::make_index_sequence<kFloatLanes>{});
  const auto larger = value > rotated ? value : rotated;
  if constexpr (kShift == 1) {
    return larger;
  } else {
    return largest_lane<kShift / 2>(larger);
  }
}

template <size_t kVecs>
Vec<uint32_t> largest_magnitude(const Vec<float> (&values)[kVecs], uint32_t limit) {
  Vec<uint32_t> largest = {};
  for (size_t v = 0; v < kVecs; ++v) {
    auto magnitude = (Vec<uint32_t>)values[v] & 0x7fffffff;
    magnitude = magnitude < limit ? magnitude : Vec<uint32_t>{};
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest_lane<>(largest);
}

constexpr uint32_t kInfinityBits = 0x7f800000;

// The exponent of a block's scale plus kScaleBias, in every lane.
template <DType dtype, size_t kVecs>
Vec<uint32_t> biased_scale(const Vec<float> (&values)[kVecs]) {
  constexpr uint32_t kTop = block_scaling(dtype).top_exponent;
  constexpr uint32_t kMin = kMinScaleExponent + kScaleBias;
  auto largest = largest_magnitude(values, 0x80000000);
  if (largest[0] >= kInfinityBits) largest = largest_magnitude(values, kInfinityBits);
  // The biased exponent of float32, which is 0 for denormals: they end at kMin like all below it.
  const auto exponent = largest >> 23;
  const auto scale = exponent > kMin + kTop ? exponent - kTop : Vec<uint32_t>{} + kMin;
  return largest == 0 ? Vec<uint32_t>{} + kScaleBias : scale;
}

Vec<float> scale_of(std::byte biased) {
  return (Vec<float>)(Vec<uint32_t>{} + (static_cast<uint32_t>(biased) << 23));
}

template <DType dtype, bool is_scaled, typename Rounding>
inline __attribute__((always_inline)) void encode_block(const char* src, char* payload,
                                                        std::byte* scale, float factor, size_t elem,
                                                        const Rounding& rounding) {
  constexpr size_t kVecs = kBlockElems<dtype, is_scaled> / kFloatLanes;
  Vec<float> values[kVecs];
  for (size_t v = 0; v < kVecs; ++v) {
    values[v] = load_bytes<Vec<float>>(src + v * kVectorBytes) * factor;
  }
  if constexpr (is_scaled) {
    const auto biased = biased_scale<dtype>(values);
    *scale = static_cast<std::byte>(biased[0]);
    const auto inverse = (Vec<float>)((2 * kScaleBias - biased) << 23);
    for (size_t v = 0; v < kVecs; ++v) values[v] *= inverse;
  }
  for (size_t v = 0; v < kVecs; ++v) {
    const size_t offset = v * kFloatLanes;
    rounding.store(payload + offset * LanesOf<dtype>::kElemBytes, values[v], elem + offset);
  }
}

template <DType dtype, bool is_scaled, typename Rounding>
void encode_with(const float* src, const WirePlace& dst, size_t num_elems, float factor,
                 const Rounding& rounding) {
  constexpr size_t kBlock = kBlockElems<dtype, is_scaled>;
  constexpr size_t kElemBytes = LanesOf<dtype>::kElemBytes;
  const auto* in = reinterpret_cast<const char*>(src);
  auto* out = reinterpret_cast<char*>(dst.payload);
  std::byte* scale = dst.scales;
  size_t elem = 0;
  for (; elem + kBlock <= num_elems; elem += kBlock, ++scale) {
    encode_block<dtype, is_scaled>(in + elem * sizeof(float), out + elem * kElemBytes, scale,
                                   factor, elem, rounding);
  }
  if (elem < num_elems) {
    alignas(kVectorBytes) char padded[kBlock * sizeof(float)] = {};
    __builtin_memcpy(padded, in + elem * sizeof(float), (num_elems - elem) * sizeof(float));
    alignas(kVectorBytes) char encoded[kBlock * kElemBytes];
    encode_block<dtype, is_scaled>(padded, encoded, scale, factor, elem, rounding);
    __builtin_memcpy(out + elem * kElemBytes, encoded, (num_elems - elem) * kElemBytes);
  }
}

template <DType dtype, bool is_scaled>
void encode(const float* src, const WirePlace& dst, size_t num_elems, float factor) {
  encode_with<dtype, is_scaled>(src, dst, num_elems, factor, ToNearest<dtype, is_scaled>{});
}
template <DType dtype, bool is_scaled>
void encode_at_random(const float* src, const WirePlace& dst, size_t num_elems, float factor,
                      uint32_t key) {
  encode_with<dtype, is_scaled>(src, dst, num_elems, factor, AtRandom<dtype, is_scaled>{key});
}

// The block at `elem` of one source, vector number v of it; reads no further than num_elems.
template <DType dtype, bool is_scaled>
Vec<float> load_encoded(const WirePlace& src, size_t elem, size_t num_elems) {
  using Lanes = WireLanes<dtype, is_scaled>;
  const auto* payload = reinterpret_cast<const char*>(src.payload) + elem * Lanes::kElemBytes;
  const auto value = elem + kFloatLanes <= num_elems ? Lanes::load(payload)
                                                     : load_part<Lanes>(payload, num_elems - elem);
  if constexpr (!is_scaled) return value;
  return value * scale_of(src.scales[elem / kBlockElems<dtype, is_scaled>]);
}

void store_floats(float* dst, Vec<float> value, size_t elem, size_t num_elems) {
  if (elem + kFloatLanes <= num_elems) {
    store_bytes(dst + elem, value);
  } else {
    __builtin_memcpy(dst + elem, &value, (num_elems - elem) * sizeof(float));
  }
}

template <DType dtype, bool is_scaled>
void decode(const WirePlace& src, float* dst, size_t num_elems, float factor) {
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    const auto value = load_encoded<dtype, is_scaled>(src, elem, num_elems) * factor;
    store_floats(dst, value, elem, num_elems);
  }
}

// Sums left to right.
template <DType dtype, bool is_scaled>
void accumulate(const WirePlace* srcs, int num_srcs, float* dst, size_t num_elems) {
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    auto sum = load_encoded<dtype, is_scaled>(srcs[0], elem, num_elems);
    for (int s = 1; s < num_srcs; ++s) {
      sum += load_encoded<dtype, is_scaled>(srcs[s], elem, num_elems);
    }
    store_floats(dst, sum, elem, num_elems);
  }
}

// ---- squares

// Partial sums: element i is added to number i % kNumPartials, in every instruction set alike.
constexpr size_t kNumPartials = 32;
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

double sum_of_squares(const float* src, size_t num_elems) {
  constexpr size_t kDoubleLanes = kVectorBytes / sizeof(double);
  constexpr size_t kVecs = kNumPartials / kDoubleLanes;
  Vec<double> sums[kVecs] = {};
  alignas(kVectorBytes) float padded[kNumPartials] = {};
  for (size_t elem = 0; elem < num_elems; elem += kNumPartials) {
    const float* values = src + elem;
    if (num_elems - elem < kNumPartials) {
      __builtin_memcpy(padded, values, (num_elems - elem) * sizeof(float));
      values = padded;
    }
    for (size_t v = 0; v < kVecs; ++v) {
      const auto value =
          __builtin_convertvector(load_bytes<HalfFloats>(values + v * kDoubleLanes), Vec<double>);
      sums[v] += value * value;  // the square of a float32 is exact in float64
    }
  }
  alignas(kVectorBytes) double partials[kNumPartials];
  __builtin_memcpy(partials, sums, sizeof(partials));
  for (size_t half = kNumPartials / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) partials[i] += partials[i + half];
  }
  return partials[0];
}

template <DType dtype, bool is_scaled>
constexpr WireLoops wire_entry() {
  if constexpr (!is_wire_dtype(dtype) || (is_scaled && !has_block_scaling(dtype))) {
    return {};
  } else {
    return {encode<dtype, is_scaled>, encode_at_random<dtype, is_scaled>, decode<dtype, is_scaled>,
            accumulate<dtype, is_scaled>};
  }
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
