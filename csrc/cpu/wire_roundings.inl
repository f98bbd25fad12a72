// How elements of the wire format are loaded and stored where that differs from tensors
// (lanes.inl): Inf in scaled float8_e4m3fn, and a faster path for values known to be finite.
// Included after lanes.inl by element_loops.inl, whose opening comment applies here too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

template <DType dtype, bool is_scaled>
struct WireLanes : LanesOf<dtype> {};
template <>
struct WireLanes<DType::kFloat8E4M3, true>
    : GenericLanes<float_format(DType::kFloat8E4M3, true), ByteBits> {};

// ---- finite numbers of scaled blocks to float8, at half the cost of narrow_to_nearest

#if ROTA_VECTOR_BYTES > 16
// Rounds to the format's precision by adding a number so large that the sum's last place is that of
// the format.
template <FloatFormat format>
Vec<float> round_places(Vec<float> value) {
  constexpr uint32_t kMinNormal = (kExponentBias - format.bias + 1) << kMantissaBits;
  constexpr uint32_t kDropped = (kMantissaBits - format.mantissa_bits) << kMantissaBits;
  const auto bits = (Vec<uint32_t>)value;
  const auto exponent = larger_of(bits & kInfinityBits, Vec<uint32_t>{} + kMinNormal);
  const auto sign = bits & ~kMagnitudeMask;
  const auto shifter = (Vec<float>)((exponent + kDropped) | sign);
  return (Vec<float>)((Vec<uint32_t>)((value + shifter) - shifter) | sign);  // keeps zeros' signs
}
// Exact after that: goes through float16, whose fields are at least as long.
ByteBits narrow_finite_e5m2(Vec<float> value) {
  return __builtin_convertvector(
      narrow_half(round_places<float_format(DType::kFloat8E5M2)>(value)) >> 8, ByteBits);
}
ByteBits narrow_finite_e4m3(Vec<float> value) {
  const auto half = narrow_half(round_places<float_format(DType::kFloat8E4M3)>(value) * 0x1p-8f);
  return __builtin_convertvector((half >> 7) | ((half >> 8) & 0x80), ByteBits);
}
#else
constexpr auto narrow_finite_e5m2 = narrow_bits<float_format(DType::kFloat8E5M2), ByteBits>;
constexpr auto narrow_finite_e4m3 = narrow_bits<float_format(DType::kFloat8E4M3, true), ByteBits>;
#endif

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
