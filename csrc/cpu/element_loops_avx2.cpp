// The element loops for AVX2 with F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "base/dtype.h"
#include "cpu/element_loops.h"

// Only what is defined below is compiled for AVX2. Headers stay above: an inline function of theirs
// could otherwise be the copy that the linker keeps for every caller. lanes.inl adds the few in
// which no function has a copy.
#pragma GCC target("avx2,f16c")
#define ROTA_ISA_NAMESPACE avx2
#define ROTA_VECTOR_BYTES 32
#include "cpu/element_loops.inl"
#endif
