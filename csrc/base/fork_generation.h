// Tells a forked child that what it holds belongs to its parent.
#pragma once

#include <cstdint>

namespace rota {

// A number that changes in a child when the process forks. A load; getpid() would be a system call.
uint64_t fork_generation();

}  // namespace rota
