// The element loops for AVX2 with F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "base/dtype.h"
#include "cpu/element_loops.h"

// Only the code below is compiled for AVX2. Headers come before the pragma: otherwise the linker
// could keep the AVX2 copy of one of their inline functions for every caller. lanes.inl includes a
// few more headers, whose functions have no copies because they are always inlined.
#pragma GCC target("avx2,f16c")
#define ROTA_ISA_NAMESPACE avx2
#define ROTA_VECTOR_BYTES 32
#include "cpu/element_loops.inl"
#endif
