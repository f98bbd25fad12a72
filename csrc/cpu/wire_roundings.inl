// How single elements of the wire format are loaded and stored, beyond what lanes.inl does for
// tensors: Inf in scaled float8_e4m3fn, and a shorter way for what is known to be finite. Included
// by the file of each instruction set after lanes.inl; what is said in element_loops.inl holds here
// too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

template <DType dtype, bool is_scaled>
struct WireLanes : LanesOf<dtype> {};
template <>
struct WireLanes<DType::kFloat8E4M3, true>
    : GenericLanes<float_format(DType::kFloat8E4M3, true), ByteBits> {};

// ---- finite numbers of scaled blocks to float8, which takes half of what narrow_to_nearest does

#if ROTA_VECTOR_BYTES > 16
// To the format's places by an addition: its sum's last place is theirs.
template <FloatFormat format>
Vec<float> round_places(Vec<float> value) {
  constexpr uint32_t kMinNormal = (kExponentBias - format.bias + 1) << kMantissaBits;
  constexpr uint32_t kDropped = (kMantissaBits - format.mantissa_bits) << kMantissaBits;
  const auto bits = (Vec<uint32_t>)value;
  const auto exponent = larger_of(bits & kInfinityBits, Vec<uint32_t>{} + kMinNormal);
  const auto sign = bits & ~kMagnitudeMask;
  const auto shifter = (Vec<float>)((exponent + kDropped) | sign);
  return (Vec<float>)((Vec<uint32_t>)((value + shifter) - shifter) | sign);  // also that of zeros
}
// Exact from here on: by way of float16, which has the same fields or longer ones.
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
