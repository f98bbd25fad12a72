// Selects this process's fault among those that tests/kernel_mutants.py has put into the kernels'
// headers, so that one program serves for every mutant.
#pragma once

#include <chrono>
#include <cstdlib>
#include <thread>
#include <type_traits>

namespace rota::test {

inline constexpr int kNoMutant = -1;

inline const int the_mutant = [] {
  const char* text = std::getenv("ROTA_MUTANT");
  return text == nullptr ? kNoMutant : std::atoi(text);
}();

// Constants are evaluated without the fault.
constexpr bool is_mutant(int id) { return !std::is_constant_evaluated() && the_mutant == id; }

// Long enough for another rank to act on what this one did last.
inline void rest() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

}  // namespace rota::test
