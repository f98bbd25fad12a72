#include "cpu/element_loops.h"

#include <cstdlib>
#include <utility>

#include "base/error.h"

namespace rota::cpu {

namespace portable {
extern const ElementLoops kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const ElementLoops kTable;
}
namespace avx512 {
extern const ElementLoops kTable;
}
#endif

const ElementLoops& element_loops(std::string_view isa) {
  // And whether this CPU runs it.
  const std::pair<const ElementLoops*, bool> candidates[] = {
#if defined(__x86_64__)
      {&avx512::kTable, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq")},
      {&avx2::kTable, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")},
#endif
      {&portable::kTable, true},
  };
  std::string supported;
  for (const auto& [table, is_supported] : candidates) {
    if (!is_supported) continue;
    if (isa.empty() || isa == table->isa) return *table;
    supported += join(supported.empty() ? "" : ", ", table->isa);
  }
  throw Error(ErrorKind::kValue, join("ROTA_ISA is '", isa, "', this CPU runs: ", supported));
}

const ElementLoops& element_loops() {
  static const ElementLoops& best = []() -> const ElementLoops& {
    const char* isa = std::getenv("ROTA_ISA");
    return element_loops(isa == nullptr ? "" : isa);
  }();
  return best;
}

}  // namespace rota::cpu
