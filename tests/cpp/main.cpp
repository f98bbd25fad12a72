// Runs the cases named on the command line, one after another; without a name, lists them.
#include <signal.h>
#include <sys/prctl.h>

#include <exception>
#include <iostream>

#include "check.h"

int main(int argc, char** argv) {
  using rota::test::all_cases;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a case that hangs must not outlive a pytest that is killed
  if (argc == 1) {
    for (const auto& test_case : all_cases()) std::cout << test_case.name << '\n';
    return 0;
  }
  for (int i = 1; i < argc; ++i) {
    bool is_known = false;
    for (const auto& test_case : all_cases()) {
      if (test_case.name != argv[i]) continue;
      is_known = true;
      try {
        test_case.run();
      } catch (const std::exception& error) {
        std::cerr << test_case.name << ": " << error.what() << '\n';
        return 1;
      }
    }
    if (!is_known) {
      std::cerr << "no case is named " << argv[i] << '\n';
      return 2;
    }
  }
  return 0;
}
