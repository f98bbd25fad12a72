// How many cores there are to run on.
#pragma once

#include <vector>

namespace rota {

// The cores that this thread may run on; taskset and containers can allow fewer than the machine
// has.
int num_usable_cores();
// Their numbers; empty if they cannot be read.
std::vector<int> usable_cores();

}  // namespace rota
