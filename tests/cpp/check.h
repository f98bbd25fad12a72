// A minimal test framework: checks that throw, and named cases.
//
// A file of cases ends in one table of {"name", function, arguments...}. test_cpp.py reads the
// names from these tables, so that pytest lists cases without building anything; each runs in a
// process of its own.
#pragma once

#include <functional>
#include <initializer_list>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace rota::test {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(std::string_view what,
                              std::source_location where = std::source_location::current()) {
  throw Failure(join(where.file_name(), ':', where.line(), ": ", what));
}

inline void check(bool is_true, std::string_view what,
                  std::source_location where = std::source_location::current()) {
  if (!is_true) fail(what, where);
}

template <typename Got, typename Expected>
void check_equal(const Got& got, const Expected& expected, std::string_view what,
                 std::source_location where = std::source_location::current()) {
  using Both = std::common_type_t<Got, Expected>;
  if (Both(got) == Both(expected)) return;
  fail(join(what, " is ", got, ", expected ", expected), where);
}

inline void check_contains(std::string_view text, std::string_view part,
                           std::source_location where = std::source_location::current()) {
  if (text.find(part) == std::string_view::npos) {
    fail(join("'", text, "' does not contain '", part, "'"), where);
  }
}

// Returns the error of this kind, with all these parts in its text, that body must throw.
template <typename Body>
Error expect_error(ErrorKind kind, Body&& body, std::initializer_list<std::string_view> parts = {},
                   std::source_location where = std::source_location::current()) {
  try {
    body();
  } catch (const Error& error) {
    for (const std::string_view part : parts) check_contains(error.what(), part, where);
    if (error.kind() == kind) return error;
    fail(join("an error of kind ", static_cast<int>(error.kind()), " (", error.what(),
              "), expected kind ", static_cast<int>(kind)),
         where);
  }
  fail("no error was thrown", where);
}

struct Case {
  // Runs the function with these arguments.
  template <typename Function, typename... Arguments>
  Case(std::string_view name, Function function, Arguments... arguments)
      : name(name), run([=] { function(arguments...); }) {}

  std::string_view name;
  std::function<void()> run;
};

// The cases of all tables that are linked into the program.
inline std::vector<Case>& all_cases() {
  static std::vector<Case> cases;
  return cases;
}

// One file's table; constructed before main() runs.
struct CaseTable {
  CaseTable(std::initializer_list<Case> cases) {
    all_cases().insert(all_cases().end(), cases.begin(), cases.end());
  }
};

}  // namespace rota::test
