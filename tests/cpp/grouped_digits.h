// A global locale that an application may set for its own output.
#pragma once

#include <locale>
#include <string>

namespace rota::test {

// From now on streams write 1,2,3 for 123, and read it so.
inline void group_digits() {
  struct Digits : std::numpunct<char> {
    char do_thousands_sep() const override { return ','; }
    std::string do_grouping() const override { return "\1"; }
  };
  std::locale::global({std::locale::classic(), new Digits});
}

}  // namespace rota::test
