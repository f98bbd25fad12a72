// The cores that there are to run on, and their caches.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace rota {

// The numbers of the cores that this thread may run on, empty if they cannot be read; taskset and
// containers can allow fewer than the machine has.
std::vector<int> usable_cores();
// How many there are, at least 1.
int num_usable_cores();

// The numbers in a list as the kernel writes them, such as "0-3,8".
std::vector<int> parse_cores(std::istream& list);

// The last-level caches of the machine together, as /sys/devices/system/cpu describes them. Not
// sysconf(): on AMD's processors it says what the whole processor has, of which a virtual machine
// may have a part.
uint64_t last_level_cache_bytes();
// For a thread on this core, by a directory of that form; 0 if it does not say.
uint64_t last_level_cache_bytes(const std::string& directory, int core);

}  // namespace rota
