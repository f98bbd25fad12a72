// Identifies the running build of this library: results cached by one build are invalid for
// another.
#pragma once

#include <string>

namespace rota {

// The linker's checksum of this library (.note.gnu.build-id), in hexadecimal; empty if the library
// was linked without one.
std::string build_id();

}  // namespace rota
