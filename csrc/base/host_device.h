// Attributes for functions that the CPU loops and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// Goes before a loop that would need too many GPU registers if it were unrolled.
#if defined(__CUDA_ARCH__)
#define ROTA_NO_UNROLL _Pragma("unroll 1")
#else
#define ROTA_NO_UNROLL
#endif

// For functions that the element loops of each instruction set call. Inlining leaves no copy that
// the linker could share between instruction sets; cpu/element_loops_avx2.cpp explains why that
// matters.
#define HOST_DEVICE_INLINE HOST_DEVICE inline __attribute__((always_inline))
