// Keeps denormals in reductions, whatever the calling thread has set (torch.set_flush_denormal):
// otherwise a result would depend on the thread that computes it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace rota::cpu {

// During its lifetime: no flush to zero, denormals are not zero, rounding to nearest even.
class IeeeFloatScope {
 public:
  IeeeFloatScope() : saved_(read()) {
    if ((saved_ & kDeviations) != 0) write(saved_ & ~kDeviations);
  }
  ~IeeeFloatScope() {
    if ((saved_ & kDeviations) != 0) write(saved_);
  }
  IeeeFloatScope(const IeeeFloatScope&) = delete;
  IeeeFloatScope& operator=(const IeeeFloatScope&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kDeviations = 0x8000 | 0x6000 | 0x0040;  // FZ, RC, DAZ of MXCSR
  static Control read() { return _mm_getcsr(); }
  static void write(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kDeviations = (1u << 24) | (3u << 22) | (1u << 19);  // FZ, RMode, FZ16
  static Control read() { return __builtin_aarch64_get_fpcr64(); }
  static void write(Control control) { __builtin_aarch64_set_fpcr64(control); }
#else
#error "rota runs on x86-64 and arm64"
#endif

  Control saved_;
};

}  // namespace rota::cpu
