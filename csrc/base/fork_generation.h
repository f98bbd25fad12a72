// Lets a forked child detect objects that belong to its parent.
#pragma once

#include <cstdint>

namespace rota {

// A number that is different in a forked child. Costs one load; getpid() would be a system call.
uint64_t fork_generation();

}  // namespace rota
