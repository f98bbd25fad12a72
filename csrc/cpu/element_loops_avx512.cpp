// The element loops for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "base/dtype.h"
#include "cpu/element_loops.h"

// Only the code below is compiled for AVX-512; see element_loops_avx2.cpp.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,prefer-vector-width=512")
#define ROTA_ISA_NAMESPACE avx512
#define ROTA_VECTOR_BYTES 64
#include "cpu/element_loops.inl"
#endif
