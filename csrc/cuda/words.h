// The unit in which threads move memory: up to 16 bytes at once, as 32-bit words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/float_bits.h"
#include "base/host_device.h"

// Goes before a loop whose counter indexes registers. Empty on the host, whose compiler warns about
// the pragma.
#if defined(__CUDA_ARCH__)
#define ROTA_UNROLL _Pragma("unroll")
#else
#define ROTA_UNROLL
#endif

namespace rota::cuda {

inline constexpr size_t kAccessBytes = 16;

template <size_t kBytes>
struct alignas(kBytes < kAccessBytes ? kBytes : kAccessBytes) Words {
  static_assert(kBytes % sizeof(uint32_t) == 0);
  uint32_t words[kBytes / sizeof(uint32_t)];
};

template <size_t kElemBytes>
using BitsOf = std::conditional_t<kElemBytes == 8, uint64_t, uint32_t>;

// The bits of element `index` among elements packed into words. The compiler must know the index.
template <size_t kElemBytes, size_t kBytes>
HOST_DEVICE_INLINE BitsOf<kElemBytes> get_bits(const Words<kBytes>& packed, size_t index) {
  if constexpr (kElemBytes == 8) {
    return packed.words[2 * index] | uint64_t{packed.words[2 * index + 1]} << 32;
  } else if constexpr (kElemBytes == 4) {
    return packed.words[index];
  } else {
    constexpr size_t kPerWord = 4 / kElemBytes;
    constexpr uint32_t kMask = (1u << (8 * kElemBytes)) - 1;
    return packed.words[index / kPerWord] >> (8 * kElemBytes * (index % kPerWord)) & kMask;
  }
}

// Stores an element's bits in words that are 0 there.
template <size_t kElemBytes, size_t kBytes>
HOST_DEVICE_INLINE void put_bits(Words<kBytes>& packed, size_t index, BitsOf<kElemBytes> bits) {
  if constexpr (kElemBytes == 8) {
    packed.words[2 * index] = static_cast<uint32_t>(bits);
    packed.words[2 * index + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (kElemBytes == 4) {
    packed.words[index] = bits;
  } else {
    constexpr size_t kPerWord = 4 / kElemBytes;
    packed.words[index / kPerWord] |= bits << (8 * kElemBytes * (index % kPerWord));
  }
}

// Part `index` of words that hold several parts.
template <size_t kPartBytes, size_t kBytes>
HOST_DEVICE_INLINE Words<kPartBytes> part_of(const Words<kBytes>& words, uint32_t index) {
  constexpr size_t kPartWords = kPartBytes / sizeof(uint32_t);
  Words<kPartBytes> part;
  ROTA_UNROLL
  for (size_t w = 0; w < kPartWords; ++w) part.words[w] = words.words[index * kPartWords + w];
  return part;
}
template <size_t kPartBytes, size_t kBytes>
HOST_DEVICE_INLINE void put_part(Words<kBytes>& words, uint32_t index,
                                 const Words<kPartBytes>& part) {
  constexpr size_t kPartWords = kPartBytes / sizeof(uint32_t);
  ROTA_UNROLL
  for (size_t w = 0; w < kPartWords; ++w) words.words[index * kPartWords + w] = part.words[w];
}

HOST_DEVICE_INLINE bool is_aligned(const void* address, size_t num_bytes) {
  return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
}

// Loads elements one at a time: they are aligned only to their own size, or only the first
// num_elems exist. The others are 0.
template <size_t kElemBytes, size_t kBytes>
HOST_DEVICE_INLINE Words<kBytes> load_part(const std::byte* src, uint32_t num_elems) {
  Words<kBytes> packed{};
  ROTA_UNROLL
  for (size_t i = 0; i < kBytes / kElemBytes; ++i) {
    if (i >= num_elems) continue;
    BitsOf<kElemBytes> bits = 0;  // a narrow element is its low end
    __builtin_memcpy(&bits, __builtin_assume_aligned(src + i * kElemBytes, kElemBytes), kElemBytes);
    put_bits<kElemBytes>(packed, i, bits);
  }
  return packed;
}

template <size_t kElemBytes, size_t kBytes>
HOST_DEVICE_INLINE void store_part(std::byte* dst, uint32_t num_elems,
                                   const Words<kBytes>& packed) {
  ROTA_UNROLL
  for (size_t i = 0; i < kBytes / kElemBytes; ++i) {
    if (i >= num_elems) continue;
    const auto bits = get_bits<kElemBytes>(packed, i);
    __builtin_memcpy(__builtin_assume_aligned(dst + i * kElemBytes, kElemBytes), &bits, kElemBytes);
  }
}

}  // namespace rota::cuda
