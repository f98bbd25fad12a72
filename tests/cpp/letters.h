// Hosts of ranks, a letter for each rank: "aab" has ranks 0 and 1 on one host and rank 2 on
// another.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "schedule/hosts.h"

namespace rota::test {

inline schedule::Hosts hosts_of(std::string_view letters) {
  std::vector<std::string> ids;
  for (const char letter : letters) ids.emplace_back(1, letter);
  return schedule::Hosts(ids);
}

}  // namespace rota::test
