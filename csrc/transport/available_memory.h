// How much memory a process may still take before the kernel's OOM killer answers.
#pragma once

#include <cstdint>

namespace rota::transport {

// Bytes: the least of what the machine has available and of what each memory cgroup above this
// process, version 1 or 2, leaves below its limit. Page cache that can be dropped counts as free.
// What cannot be read does not count.
uint64_t available_memory();

}  // namespace rota::transport
