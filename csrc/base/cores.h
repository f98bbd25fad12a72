// How many cores there are to run on.
#pragma once

#include <vector>

namespace rota {

// The numbers of the cores that this thread may run on, empty if they cannot be read; taskset and
// containers can allow fewer than the machine has.
std::vector<int> usable_cores();
// How many there are, at least 1.
int num_usable_cores();

}  // namespace rota
