// The formulas of the number formats as device code: nvcc compiles the kernels, which instantiate
// everything that CUDA kernels may use. nvcc and g++ both evaluate the assertions, so host and
// device agree on the results. float_bits_cases.cpp checks the same instances against the
// definitions.
#include "base/block_scale.h"
#include "base/combine.h"
#include "base/dtype.h"
#include "base/float_bits.h"
#include "base/random_bits.h"
#include "base/wire_format.h"

namespace rota {

constexpr FloatFormat kHalf = float_format(DType::kFloat16);
constexpr FloatFormat kBFloat = float_format(DType::kBFloat16);
constexpr FloatFormat kE5M2 = float_format(DType::kFloat8E5M2);
constexpr FloatFormat kE4M3 = float_format(DType::kFloat8E4M3);
constexpr FloatFormat kScaledE4M3 = float_format(DType::kFloat8E4M3, true);
constexpr float kInf = __builtin_inff();
constexpr float kNan = __builtin_nanf("");

// ---- float_bits.h: ties, overflow, the smallest number, NaN
static_assert(narrow_to_nearest<kHalf>(1.0f) == 0x3c00);
static_assert(narrow_to_nearest<kHalf>(1 + 0x3p-11f) == 0x3c02);
static_assert(narrow_to_nearest<kHalf>(0x1p-24f) == 1 && narrow_to_nearest<kHalf>(0x1p-25f) == 0);
static_assert(narrow_to_nearest<kBFloat>(kNan) == 0x7fc0);
static_assert(narrow_to_nearest<kE5M2>(61440.0f) == 0x7c);
static_assert(narrow_to_nearest<kE4M3>(448.0f) == 0x7e && narrow_to_nearest<kE4M3>(kInf) == 0x7f);
static_assert(narrow_to_nearest<kScaledE4M3>(kInf) == 0x7e);

static_assert(narrow_at_random<kHalf>(1 + 0x1p-12f, 0xbfffffffu) == 0x3c00);
static_assert(narrow_at_random<kHalf>(1 + 0x1p-12f, 0xc0000000u) == 0x3c01);

static_assert(widen<kHalf>(0xfc00u) == -kInf && widen<kHalf>(0x7e00u) != widen<kHalf>(0x7e00u));
static_assert(widen<kBFloat>(0xbf80u) == -1);
static_assert(widen<kE5M2>(0x7bu) == 57344);
static_assert(widen<kE4M3>(0x7eu) == 448 && widen<kE4M3>(0x81u) == -0x1p-9f);
static_assert(widen<kScaledE4M3>(0x7du) == 416 && widen<kScaledE4M3>(0xfeu) == -kInf);

static_assert(round_to_odd(1 + 0x1p-40) == 1 + 0x1p-23f && round_to_odd(1.5) == 1.5f);

// ---- combine.h: signed sums and products wrap without undefined behaviour
static_assert(combine<DType::kInt32, ReduceOp::kSum>(0x7fffffff, 1) == -0x7fffffff - 1);
static_assert(combine<DType::kInt32, ReduceOp::kProduct>(0x10000, 0x10000) == 0);
static_assert(combine<DType::kInt64, ReduceOp::kProduct>(int64_t{1} << 62, int64_t{4}) == 0);
static_assert(combine<DType::kInt16, ReduceOp::kProduct>(int16_t{-1}, int16_t{-1}) == 1);
static_assert(combine<DType::kInt8, ReduceOp::kSum>(int8_t{127}, int8_t{1}) == -128);

// ---- block_scale.h: top exponents 14 and 7, no scale below 2^-125, 2^0 for zeros
static_assert(biased_scale<DType::kFloat16>(bit_as<uint32_t>(1.5f)) == 127 - 14);
static_assert(biased_scale<DType::kFloat8E4M3>(bit_as<uint32_t>(0x1p20f)) == 127 + 13);
static_assert(biased_scale<DType::kFloat16>(1u) == 2 && biased_scale<DType::kFloat16>(0u) == 127);
static_assert(scale_of(127u - 14) == 0x1p-14f && inverse_scale_of(127u - 14) == 0x1p14f);

// ---- random_bits.h: a seed's next stream differs from the next seed
static_assert(tile_key(5, 1, 0) != tile_key(6, 0, 0) && random_of(1u) != random_of(2u));

#if defined(__CUDACC__)
template <FloatFormat format>
__device__ float round_trips(float value, uint32_t random) {
  const uint32_t code = narrow_to_nearest<format>(value);
  return widen<format>(code) + widen<format>(narrow_at_random<format>(value, random));
}

__global__ void formats_kernel(double value, uint64_t seed, WireFormat format, std::byte* wire,
                               float* sums) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const float rounded = round_to_odd(value);
  const uint32_t random = random_of(tile_key(seed, 1, 2) + index);
  const uint32_t biased = biased_scale<DType::kFloat8E5M2>(bit_as<uint32_t>(rounded));
  const auto num_bytes = static_cast<float>(format.num_bytes(index) + info(format.dtype).num_bytes);
  *format.from(format.place(wire, 1024), 64 * index).scales = static_cast<std::byte>(biased);
  sums[index] = round_trips<kHalf>(rounded, random) + round_trips<kBFloat>(rounded, random) +
                round_trips<kE5M2>(rounded, random) + round_trips<kE4M3>(rounded, random) +
                round_trips<kScaledE4M3>(rounded, random) + scale_of(biased) +
                inverse_scale_of(biased) + num_bytes;
}

template <DType dtype, ReduceOp op, typename T>
__device__ T combined(T a, T b) {
  if constexpr (is_defined(op, dtype)) {
    return combine<dtype, op>(a, b);
  } else {
    return a;
  }
}

template <DType dtype, typename T>
__global__ void combine_kernel(T* elems) {
  const T a = elems[0], b = elems[1];
  elems[2] = combined<dtype, ReduceOp::kSum>(a, b);
  elems[3] = combined<dtype, ReduceOp::kAvg>(a, b);
  elems[4] = combined<dtype, ReduceOp::kProduct>(a, b);
  elems[5] = combined<dtype, ReduceOp::kMin>(a, b);
  elems[6] = combined<dtype, ReduceOp::kMax>(a, b);
  elems[7] = combined<dtype, ReduceOp::kBand>(a, b);
  elems[8] = combined<dtype, ReduceOp::kBor>(a, b);
  elems[9] = combined<dtype, ReduceOp::kBxor>(a, b);
}
template __global__ void combine_kernel<DType::kFloat32>(float*);
template __global__ void combine_kernel<DType::kFloat64>(double*);
template __global__ void combine_kernel<DType::kUInt8>(uint8_t*);
template __global__ void combine_kernel<DType::kInt8>(int8_t*);
template __global__ void combine_kernel<DType::kInt16>(int16_t*);
template __global__ void combine_kernel<DType::kInt32>(int32_t*);
template __global__ void combine_kernel<DType::kInt64>(int64_t*);
template __global__ void combine_kernel<DType::kBool>(uint8_t*);
#endif

}  // namespace rota
