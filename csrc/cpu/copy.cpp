#include "cpu/copy.h"

#include <algorithm>

#include "base/cores.h"
#include "base/flag.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rota::cpu {

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // which does not see these stores
void stream_bytes(void* dst, const void* src, size_t num_bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  // Whole cache lines, so that the processor combines their stores.
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kCacheLineBytes;
  const size_t head = misaligned == 0 ? 0 : std::min(num_bytes, kCacheLineBytes - misaligned);
  copy_bytes(to, from, head);
  size_t i = head;
  for (; i + kCacheLineBytes <= num_bytes; i += kCacheLineBytes) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    const __m128i words[] = {_mm_loadu_si128(in), _mm_loadu_si128(in + 1), _mm_loadu_si128(in + 2),
                             _mm_loadu_si128(in + 3)};
    for (int word = 0; word < 4; ++word) _mm_stream_si128(out + word, words[word]);
  }
  copy_bytes(to + i, from + i, num_bytes - i);
  // Other stores do not wait for these: whoever is told that the output is there must find it.
  _mm_sfence();
}
#else
void stream_bytes(void* dst, const void* src, size_t num_bytes) { copy_bytes(dst, src, num_bytes); }
#endif

bool streams(uint64_t num_bytes) { return 2 * num_bytes >= last_level_cache_bytes(); }

OutputCopier::OutputCopier(uint64_t num_bytes, int world_size)
    : streams_(streams(static_cast<uint64_t>(world_size) * num_bytes)) {}

OutputCopier OutputCopier::for_message(uint64_t num_bytes) {
  return OutputCopier(num_bytes >= last_level_cache_bytes());
}

}  // namespace rota::cpu
