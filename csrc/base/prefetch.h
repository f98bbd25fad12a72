// Fetches a cache line in order to write to it: no other core has it any more when it has come.
#pragma once

namespace rota {

inline void prefetch_to_write(const void* address) {
#if defined(__x86_64__)
  // The compiler has the instruction only with -mprfchw; processors without it do nothing.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

}  // namespace rota
