// One spelling for functions that the CPU loops and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// In front of a loop that a GPU's registers would not hold several rounds of.
#if defined(__CUDA_ARCH__)
#define ROTA_NO_UNROLL _Pragma("unroll 1")
#else
#define ROTA_NO_UNROLL
#endif

// For what the element loops of each instruction set call: inlined, it leaves no copy that the
// linker could share between them. cpu/element_loops_avx2.cpp says what would come of that.
#define HOST_DEVICE_INLINE HOST_DEVICE inline __attribute__((always_inline))
