// The element loops of every instruction set that this CPU has.
#pragma once

#include <vector>

#include "check.h"
#include "cpu/element_loops.h"

namespace rota::test {

inline std::vector<const cpu::ElementLoops*> all_tables() {
  std::vector<const cpu::ElementLoops*> tables;
  for (const std::string_view isa : {"portable", "avx2", "avx512"}) {
    try {
      tables.push_back(&cpu::element_loops(isa));
      check_equal(tables.back()->isa, isa, "table");
    } catch (const Error& error) {  // this CPU lacks it
      check(error.kind() == ErrorKind::kValue, error.what());
    }
  }
  return tables;
}

}  // namespace rota::test
