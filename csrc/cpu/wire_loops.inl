// The wire loops: float32 into the wire format (base/wire_format.h) and back, sums of what several
// ranks sent, and sums of squares of a result. Included after wire_roundings.inl by
// element_loops.inl, whose opening comment applies here too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

// Round and store encoded elements. `elem` counts from the start of the loop; is_finite: all are
// known to be finite and not to overflow.
template <DType dtype, bool is_scaled>
struct ToNearest {
  template <bool is_finite>
  void store(char* dst, Vec<float> value, size_t) const {
    if constexpr (is_finite && dtype == DType::kFloat8E5M2) {
      store_bytes(dst, narrow_finite_e5m2(value));
    } else if constexpr (is_finite && dtype == DType::kFloat8E4M3) {
      store_bytes(dst, narrow_finite_e4m3(value));
    } else {
      WireLanes<dtype, is_scaled>::store(dst, value);
    }
  }
};
template <DType dtype, bool is_scaled>
struct AtRandom {
  uint32_t key;
  template <bool is_finite>
  void store(char* dst, Vec<float> value, size_t elem) const {
    if constexpr (dtype == DType::kFloat32) {
      store_bytes(dst, value);
    } else {
      Vec<uint32_t> counter;
      for (size_t i = 0; i < kFloatLanes; ++i) counter[i] = static_cast<uint32_t>(i);
      const auto random = random_of(counter + (key + static_cast<uint32_t>(elem)));
      const auto rounded = narrow_at_random<float_format(dtype, is_scaled)>(value, random);
      store_bytes(dst,
                  __builtin_convertvector(rounded, typename WireLanes<dtype, is_scaled>::Bits));
    }
  }
};

// ---- blocks and their scales

// Elements that share a scale; without scales, elements per iteration of a loop.
template <DType dtype, bool is_scaled>
constexpr size_t kBlockElems = is_scaled ? block_scaling(dtype).block_elems : 64;

// Lanes kFirst, kFirst + 1 ... as a vector of their own.
template <size_t kFirst, typename V, size_t... kLanes>
auto lanes_from(V value, std::index_sequence<kLanes...>) {
  constexpr size_t kNumLanes = sizeof(V) / sizeof(value[0]);
  return __builtin_shufflevector(value, value, ((kFirst + kLanes) % kNumLanes)...);
}

// Vectors of half the length cost half as much on some processors.
template <typename V>
uint32_t largest_lane(V value) {
  if constexpr (sizeof(V) > 16) {
    constexpr size_t kHalf = sizeof(V) / sizeof(uint32_t) / 2;
    constexpr auto kLanes = std::make_index_sequence<kHalf>{};
    return largest_lane(larger_of(lanes_from<0>(value, kLanes), lanes_from<kHalf>(value, kLanes)));
  } else {
    constexpr auto kLanes = std::make_index_sequence<4>{};
    value = larger_of(value, lanes_from<2>(value, kLanes));
    return larger_of(value, lanes_from<1>(value, kLanes))[0];
  }
}

// The largest of the finite elements times `factor`. Not inlined, because it is rare; reads them
// again, because passing them would put every block into memory.
__attribute__((noinline)) uint32_t largest_finite_magnitude(const char* src, size_t num_elems,
                                                            float factor) {
  Vec<uint32_t> largest = {};
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    const auto value = load_bytes<Vec<float>>(src + elem * sizeof(float)) * factor;
    const auto magnitude = (Vec<uint32_t>)value & kMagnitudeMask;
    largest = larger_of(largest, magnitude < kInfinityBits ? magnitude : Vec<uint32_t>{});
  }
  return largest_lane(largest);
}

Vec<float> load_scale(std::byte biased) {
  return scale_of<Vec<float>>(Vec<uint32_t>{} + static_cast<uint32_t>(biased));
}

// Prefetch distances. A block takes so many instructions that the core does not run ahead past the
// next one by itself (25 MiB of float32, 2 ranks, float16 in scaled blocks: 3.33 ms with neither
// prefetch, 2.81 with the first, 2.47 with both; half or twice the distance is slower; Xeon,
// AVX-512, 2026-11-21). The plain sums of element_loops.inl gain nothing.
constexpr size_t kPrefetchTensorBytes = 2048;
constexpr size_t kPrefetchWireBytes = 1024;

// Adds to the address as an integer, because it may point outside the array. Always inlined,
// because g++ 12 assumes that a function that only prefetches has no effect, and drops calls not
// inlined by then.
inline __attribute__((always_inline)) void prefetch(const char* address, size_t num_bytes_ahead) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(address) + num_bytes_ahead));
}

// Writes the scale of a block times `factor`; false if an element of it is Inf or NaN.
template <DType dtype>
inline __attribute__((always_inline)) bool write_scale(const char* src, float factor,
                                                       std::byte* scale) {
  constexpr size_t kBlock = kBlockElems<dtype, true>;
  Vec<uint32_t> magnitudes = {};
  for (size_t elem = 0; elem < kBlock; elem += kFloatLanes) {
    const char* vector = src + elem * sizeof(float);
    prefetch(vector, kPrefetchTensorBytes);
    const auto value = load_bytes<Vec<float>>(vector) * factor;
    magnitudes = larger_of(magnitudes, (Vec<uint32_t>)value & kMagnitudeMask);
  }
  uint32_t largest = largest_lane(magnitudes);
  const bool is_finite = largest < kInfinityBits;
  if (__builtin_expect(!is_finite, false)) largest = largest_finite_magnitude(src, kBlock, factor);
  *scale = static_cast<std::byte>(biased_scale<dtype>(largest));
  return is_finite;
}

template <DType dtype, bool is_scaled, bool is_finite, typename Rounding>
inline __attribute__((always_inline)) void write_block(const char* src, char* payload,
                                                       std::byte* scale, float factor, size_t elem,
                                                       const Rounding& rounding) {
  auto inverse = Vec<float>{} + 1;
  if constexpr (is_scaled) {
    inverse = Vec<float>{} + inverse_scale_of(static_cast<uint32_t>(*scale));
  }
  for (size_t lane = 0; lane < kBlockElems<dtype, is_scaled>; lane += kFloatLanes) {
    const char* vector = src + lane * sizeof(float);
    if constexpr (!is_scaled) prefetch(vector, kPrefetchTensorBytes);
    const auto value = load_bytes<Vec<float>>(vector) * factor;
    rounding.template store<is_finite>(payload + lane * LanesOf<dtype>::kElemBytes, value * inverse,
                                       elem + lane);
  }
}

// Blocks whose scales are computed before the first of them is written. The scale of a single block
// is known so late that the core's queues fill with operations that wait for it.
constexpr size_t kGroupBlocks = 8;

template <DType dtype, bool is_scaled, typename Rounding>
inline __attribute__((always_inline)) void encode_blocks(const char* src, char* payload,
                                                         std::byte* scales, size_t num_blocks,
                                                         float factor, size_t elem,
                                                         const Rounding& rounding) {
  constexpr size_t kBlock = kBlockElems<dtype, is_scaled>;
  constexpr size_t kElemBytes = LanesOf<dtype>::kElemBytes;
  bool are_finite = is_scaled;
  if constexpr (is_scaled) {
    for (size_t b = 0; b < num_blocks; ++b) {
      are_finite &= write_scale<dtype>(src + b * kBlock * sizeof(float), factor, scales + b);
    }
  }
  const auto write = [&](auto is_finite) __attribute__((always_inline)) {
    for (size_t b = 0; b < num_blocks; ++b) {
      write_block<dtype, is_scaled, is_finite>(src + b * kBlock * sizeof(float),
                                               payload + b * kBlock * kElemBytes, scales + b,
                                               factor, elem + b * kBlock, rounding);
    }
  };
  if (__builtin_expect(are_finite, true)) {
    write(std::bool_constant<is_scaled>{});
  } else {
    write(std::false_type{});
  }
}

template <DType dtype, bool is_scaled, typename Rounding>
void encode_with(const float* src, const WirePlace& dst, size_t num_elems, float factor,
                 const Rounding& rounding) {
  constexpr size_t kBlock = kBlockElems<dtype, is_scaled>;
  constexpr size_t kElemBytes = LanesOf<dtype>::kElemBytes;
  const auto* in = reinterpret_cast<const char*>(src);
  auto* out = reinterpret_cast<char*>(dst.payload);
  std::byte* scales = dst.scales;
  size_t elem = 0;
  while (elem + kBlock <= num_elems) {
    const size_t rest = (num_elems - elem) / kBlock;
    const size_t num_blocks = rest < kGroupBlocks ? rest : kGroupBlocks;
    encode_blocks<dtype, is_scaled>(in + elem * sizeof(float), out + elem * kElemBytes, scales,
                                    num_blocks, factor, elem, rounding);
    elem += num_blocks * kBlock;
    scales += num_blocks;
  }
  if (elem < num_elems) {
    alignas(kVectorBytes) char padded[kBlock * sizeof(float)] = {};
    __builtin_memcpy(padded, in + elem * sizeof(float), (num_elems - elem) * sizeof(float));
    alignas(kVectorBytes) char encoded[kBlock * kElemBytes];
    encode_blocks<dtype, is_scaled>(padded, encoded, scales, 1, factor, elem, rounding);
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

// Loads a block of one source, times its scale.
template <DType dtype, bool is_scaled, size_t kVecs>
inline __attribute__((always_inline)) void load_block(const WirePlace& src, size_t elem,
                                                      Vec<float> (&values)[kVecs]) {
  using Lanes = WireLanes<dtype, is_scaled>;
  const auto* payload = reinterpret_cast<const char*>(src.payload) + elem * Lanes::kElemBytes;
  for (size_t v = 0; v < kVecs; ++v) {
    const auto* vector = payload + v * kFloatLanes * Lanes::kElemBytes;
    prefetch(vector, kPrefetchWireBytes);
    values[v] = Lanes::load(vector);
  }
  if constexpr (is_scaled) {
    const auto scale = load_scale(src.scales[elem / kBlockElems<dtype, is_scaled>]);
    for (size_t v = 0; v < kVecs; ++v) values[v] *= scale;
  }
}

// What sum_up() adds: a block from `elem` on.
template <DType dtype, bool is_scaled>
struct EncodedBlock {
  const WirePlace* srcs;
  size_t elem;

  template <size_t kVecs>
  void load(int source, Vec<float> (&values)[kVecs]) const {
    load_block<dtype, is_scaled>(srcs[source], elem, values);
  }
  static Vec<float> add(Vec<float> a, Vec<float> b) { return a + b; }
};

// Sums one block of the sources, times `factor`.
template <DType dtype, bool is_scaled>
void sum_block(const Summands<WirePlace>& summands, size_t elem, float factor, char* dst) {
  constexpr size_t kVecs = kBlockElems<dtype, is_scaled> / kFloatLanes;
  Vec<float> sums[kVecs];
  sum_up(EncodedBlock<dtype, is_scaled>{summands.srcs, elem}, summands, sums);
  for (size_t v = 0; v < kVecs; ++v) store_bytes(dst + v * kVectorBytes, sums[v] * factor);
}

// Loads num_lanes elements from `elem`, at most one vector.
template <DType dtype, bool is_scaled>
Vec<float> load_rest(const WirePlace& src, size_t elem, size_t num_lanes) {
  using Lanes = WireLanes<dtype, is_scaled>;
  const auto* payload = reinterpret_cast<const char*>(src.payload) + elem * Lanes::kElemBytes;
  const auto value = load_part<Lanes>(payload, num_lanes);
  if constexpr (!is_scaled) return value;
  return value * load_scale(src.scales[elem / kBlockElems<dtype, is_scaled>]);
}

// The same for num_lanes elements.
template <DType dtype, bool is_scaled>
struct EncodedRest {
  const WirePlace* srcs;
  size_t elem;
  size_t num_lanes;

  void load(int source, Vec<float> (&values)[1]) const {
    values[0] = load_rest<dtype, is_scaled>(srcs[source], elem, num_lanes);
  }
  static Vec<float> add(Vec<float> a, Vec<float> b) { return a + b; }
};

template <DType dtype, bool is_scaled>
void decode_sum(const Summands<WirePlace>& summands, float* dst, size_t num_elems, float factor) {
  constexpr size_t kBlock = kBlockElems<dtype, is_scaled>;
  auto* out = reinterpret_cast<char*>(dst);
  size_t elem = 0;
  for (; elem + kBlock <= num_elems; elem += kBlock) {
    sum_block<dtype, is_scaled>(summands, elem, factor, out + elem * sizeof(float));
  }
  for (; elem < num_elems; elem += kFloatLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < kFloatLanes ? rest : kFloatLanes;
    Vec<float> sum[1];
    sum_up(EncodedRest<dtype, is_scaled>{summands.srcs, elem, num_lanes}, summands, sum);
    sum[0] *= factor;
    __builtin_memcpy(out + elem * sizeof(float), sum, num_lanes * sizeof(float));
  }
}

// ---- squares

// Element i is added to partial sum i % kNumPartials, in every instruction set.
constexpr size_t kNumPartials = 32;
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

// The square of a float32 is exact in float64, so a fused multiply-add gives the same bits.
#if ROTA_VECTOR_BYTES == 64
Vec<double> widen_to_double(HalfFloats value) {
  return (Vec<double>)_mm512_maskz_cvtps_pd(0xff, (__m256)value);  // g++ 12 would split it
}
Vec<double> add_square(Vec<double> sum, Vec<double> value) {
  return (Vec<double>)_mm512_fmadd_pd((__m512d)value, (__m512d)value, (__m512d)sum);
}
#else
Vec<double> widen_to_double(HalfFloats value) {
  return __builtin_convertvector(value, Vec<double>);
}
Vec<double> add_square(Vec<double> sum, Vec<double> value) { return sum + value * value; }
#endif

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
      const auto value = widen_to_double(load_bytes<HalfFloats>(values + v * kDoubleLanes));
      sums[v] = add_square(sums[v], value);
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
    return {encode<dtype, is_scaled>, encode_at_random<dtype, is_scaled>,
            decode_sum<dtype, is_scaled>};
  }
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
