// A block of threads on the GPU, with the operations that kernel bodies use. Bodies are templates
// over it, so that tests run the same bodies on the host, on CPU threads (tests/cpp/host_block.h).
#pragma once

#include <cuda_fp16.h>

#include "base/fixed_tree.h"
#include "cuda/conversions.h"
#include "cuda/words.h"

namespace rota::cuda {

class DeviceBlock {
 public:
  // Which thread of which block this is.
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int num_threads() const { return static_cast<int>(blockDim.x); }
  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ int num_blocks() const { return static_cast<int>(gridDim.x); }
  // Which of the launch's local ranks this block works for.
  __device__ int local_rank() const { return static_cast<int>(blockIdx.y); }

  // Barriers: what a thread wrote before, every thread of the block can read after. all(): whether
  // `value` is true in every thread.
  __device__ void sync() const { __syncthreads(); }
  __device__ bool all(bool value) const { return __syncthreads_and(value) != 0; }

  // The largest value among kLanes neighbouring threads, all of which call this together.
  template <uint32_t kLanes>
  __device__ uint32_t largest_of_lanes(uint32_t value) const {
    ROTA_UNROLL
    for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2) {
      value = max(value, __shfl_xor_sync(neighbours<kLanes>(), value, distance));
    }
    return value;
  }
  // The value of the thread whose number differs in the bit `distance`; kLanes as above.
  template <uint32_t kLanes, typename T>
  __device__ T from_lane(T value, uint32_t distance) const {
    return __shfl_xor_sync(neighbours<kLanes>(), value, distance);
  }
  // The value of a thread, by its place among the kLanes.
  template <uint32_t kLanes, typename T>
  __device__ T from_place(T value, uint32_t place) const {
    return __shfl_sync(neighbours<kLanes>(), value, static_cast<int>(place), kLanes);
  }

  // Each access moves 16 bytes, or kBytes if that is less, and is aligned to its size.
  template <size_t kBytes>
  __device__ __forceinline__ Words<kBytes> load(const std::byte* src) const {
    using Access = Words < kBytes<kAccessBytes ? kBytes : kAccessBytes>;
    Words<kBytes> words;
    ROTA_UNROLL
    for (size_t i = 0; i < kBytes / sizeof(Access); ++i) {
      const Access access = load_once(reinterpret_cast<const Access*>(src) + i);
      ROTA_UNROLL
      for (size_t w = 0; w < sizeof(Access) / 4; ++w) {
        words.words[i * sizeof(Access) / 4 + w] = access.words[w];
      }
    }
    return words;
  }
  template <size_t kBytes>
  __device__ __forceinline__ void store(std::byte* dst, const Words<kBytes>& words) const {
    using Access = Words < kBytes<kAccessBytes ? kBytes : kAccessBytes>;
    ROTA_UNROLL
    for (size_t i = 0; i < kBytes / sizeof(Access); ++i) {
      Access access;
      ROTA_UNROLL
      for (size_t w = 0; w < sizeof(Access) / 4; ++w) {
        access.words[w] = words.words[i * sizeof(Access) / 4 + w];
      }
      store_once(reinterpret_cast<Access*>(dst) + i, access);
    }
  }

  struct Pair {
    uint64_t first;
    uint64_t second;
  };
  // Two neighbouring words, each accessed atomically at system scope, with relaxed order.
  __device__ __forceinline__ void store_pair(uint64_t* dst, uint64_t first, uint64_t second) const {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(dst), "l"(first), "l"(second)
                 : "memory");
  }
  __device__ __forceinline__ Pair load_pair(const uint64_t* src) const {
    Pair pair;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(pair.first), "=l"(pair.second)
                 : "l"(src)
                 : "memory");
    return pair;
  }

  // Shared memory of the block, for the sum of squares.
  __device__ double* shared_doubles() const {
    __shared__ double doubles[kTreeDoubles];
    return doubles;
  }

  // As SoftwareConversions has them.
  __device__ float widen_half(uint32_t code) const {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(code)));
  }
  __device__ uint32_t narrow_half(float value) const {
    return __half_as_ushort(__float2half_rn(value));
  }
  __device__ uint32_t narrow_halves(float low, float high) const {
    uint32_t codes;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(high), "f"(low));
    return codes;
  }
  template <DType dtype>
  __device__ uint32_t narrow_float8(float low, float high) const {
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    if constexpr (dtype == DType::kFloat8E4M3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    }
    return codes;
#else
    return SoftwareConversions::narrow_float8<dtype>(low, high);
#endif
  }
  __device__ uint32_t halves_of_e4m3(uint32_t codes) const {
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    return halves;
#else
    return SoftwareConversions::halves_of_e4m3(codes);
#endif
  }

  // For a spinning wait.
  __device__ void pause() const {}
  __device__ uint64_t now_ns() const {
    uint64_t time_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time_ns));
    return time_ns;
  }

 private:
  // This thread's group of kLanes neighbouring threads, as a mask of the warp.
  template <uint32_t kLanes>
  __device__ __forceinline__ static uint32_t neighbours() {
    const uint32_t lane = threadIdx.x % 32;  // warpSize is not a constant, so % would divide
    return ~0u >> (32 - kLanes) << (lane / kLanes * kLanes);
  }
  // In assembly, because the compiler splits a load whose halves are used separately.
  __device__ __forceinline__ static Words<16> load_once(const Words<16>* src) {
    Words<16> value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]),
                   "=r"(value.words[3])
                 : "l"(src)
                 : "memory");
    return value;
  }
  // Tells the compiler that the memory is global, so that this is not determined at run time.
  __device__ __forceinline__ static Words<8> load_once(const Words<8>* src) {
    const auto* global = reinterpret_cast<const uint2*>(src);
    __builtin_assume(__isGlobal(global));
    const uint2 value = *global;
    return {{value.x, value.y}};
  }
  __device__ __forceinline__ static Words<4> load_once(const Words<4>* src) {
    __builtin_assume(__isGlobal(src));
    return *src;
  }
  __device__ __forceinline__ static void store_once(Words<16>* dst, const Words<16>& words) {
    auto* global = reinterpret_cast<uint4*>(dst);
    __builtin_assume(__isGlobal(global));
    *global = make_uint4(words.words[0], words.words[1], words.words[2], words.words[3]);
  }
  __device__ __forceinline__ static void store_once(Words<8>* dst, const Words<8>& words) {
    auto* global = reinterpret_cast<uint2*>(dst);
    __builtin_assume(__isGlobal(global));
    *global = make_uint2(words.words[0], words.words[1]);
  }
  __device__ __forceinline__ static void store_once(Words<4>* dst, const Words<4>& words) {
    __builtin_assume(__isGlobal(dst));
    *dst = words;
  }
};

}  // namespace rota::cuda
