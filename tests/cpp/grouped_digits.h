// A global locale that an application may set for its own output.
#pragma once

#include <locale>
#include <string>

namespace rota::test {

// While it lives, streams write 1,2,3 for 123, and read it so.
class GroupedDigits {
 public:
  GroupedDigits() : before_(std::locale::global({std::locale::classic(), new Digits})) {}
  ~GroupedDigits() { std::locale::global(before_); }
  GroupedDigits(const GroupedDigits&) = delete;
  GroupedDigits& operator=(const GroupedDigits&) = delete;

 private:
  struct Digits : std::numpunct<char> {
    char do_thousands_sep() const override { return ','; }
    std::string do_grouping() const override { return "\1"; }
  };

  const std::locale before_;
};

}  // namespace rota::test
