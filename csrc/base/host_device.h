// One spelling for functions that the CPU loops and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
