// Which build of this library runs: what is remembered of one build says nothing about another.
#pragma once

#include <string>

namespace rota {

// The linker's checksum of this library (.note.gnu.build-id), in hexadecimal; empty where it was
// linked without one.
std::string build_id();

}  // namespace rota
