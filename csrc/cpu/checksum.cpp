#include "cpu/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/flag.h"
#include "cpu/copy.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rota::cpu {
namespace {

constexpr size_t kLanes = kCacheLineBytes / sizeof(uint64_t);

struct Sums {
  std::array<uint64_t, kLanes> of_words{};
  std::array<uint64_t, kLanes> of_sums{};

  void add(const std::array<uint64_t, kLanes>& words) {
    for (size_t lane = 0; lane < kLanes; ++lane) of_words[lane] += words[lane];
    for (size_t lane = 0; lane < kLanes; ++lane) of_sums[lane] += of_words[lane];
  }

  // Lanes and kinds of sums count differently, and so do lengths that end in zeroes.
  uint64_t finish(size_t num_bytes) const {
    uint64_t hash = num_bytes;
    const auto mix = [&hash](uint64_t word) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    };
    std::ranges::for_each(of_words, mix);
    std::ranges::for_each(of_sums, mix);
    return hash;
  }
};

// Calls store(offset, words) for every line, the last of which is filled with zeroes.
template <typename Store>
uint64_t sum_lines(const std::byte* data, size_t num_bytes, const Store& store) {
  Sums sums;
  std::array<uint64_t, kLanes> words;
  size_t i = 0;
  for (; i + kCacheLineBytes <= num_bytes; i += kCacheLineBytes) {
    std::memcpy(words.data(), data + i, kCacheLineBytes);
    sums.add(words);
    store(i, words);
  }
  if (i < num_bytes) {
    words = {};
    std::memcpy(words.data(), data + i, num_bytes - i);
    sums.add(words);
    store(i, words);
  }
  return sums.finish(num_bytes);
}

}  // namespace

uint64_t checksum(const void* data, size_t num_bytes) {
  return sum_lines(static_cast<const std::byte*>(data), num_bytes, [](size_t, const auto&) {});
}

uint64_t copy_with_checksum(void* dst, const void* src, size_t num_bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const auto store = [to, num_bytes](size_t i, const auto& words) {
    std::memcpy(to + i, words.data(), std::min(kCacheLineBytes, num_bytes - i));
  };
#if defined(__SSE2__)
  if (streams(num_bytes) && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    const uint64_t sum = sum_lines(from, num_bytes, [&](size_t i, const auto& words) {
      if (i + kCacheLineBytes > num_bytes) return store(i, words);
      const auto* in = reinterpret_cast<const __m128i*>(words.data());
      auto* out = reinterpret_cast<__m128i*>(to + i);
      for (int part = 0; part < 4; ++part) _mm_stream_si128(out + part, _mm_loadu_si128(in + part));
    });
    _mm_sfence();  // as in stream_bytes()
    return sum;
  }
#endif
  return sum_lines(from, num_bytes, store);
}

}  // namespace rota::cpu
