// Who shares a host or a NUMA node, and when the sum over hosts of the sums within them is the sum
// in a tree.
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "letters.h"
#include "processes.h"
#include "transport/place.h"

namespace rota::test {
namespace {

using schedule::Hosts;

void hosts_are_numbered_by_their_lowest_rank() {
  const Hosts hosts = hosts_of("cacab");
  check_equal(hosts.num_hosts(), 3, "number of hosts");
  check(hosts.ranks_of(0) == std::vector{0, 2}, "the ranks of c");
  check(hosts.ranks_of(1) == std::vector{1, 3}, "the ranks of a");
  check(hosts.ranks_of(2) == std::vector{4}, "the ranks of b");
  check_equal(hosts.place_of(3).host, 1, "host of rank 3");
  check_equal(hosts.place_of(3).local_rank, 1, "local rank of rank 3");
  check_equal(hosts.num_rails(), 1, "number of rails");
}

// Each rank is sent to by all for whom it is the partner, and by nobody else.
void partners_are_found_from_both_sides() {
  for (const char* letters : {"ab", "aabb", "aaab", "abbb", "aaaaabbccc", "abcabcab"}) {
    const Hosts hosts = hosts_of(letters);
    for (int rank = 0; rank < hosts.world_size(); ++rank) {
      const std::vector<int> ranks = hosts.whose_partner_is(rank);
      for (int other = 0; other < hosts.world_size(); ++other) {
        const int host = hosts.place_of(rank).host;
        const bool is_partner =
            hosts.place_of(other).host != host && hosts.partner_of(other, host) == rank;
        check_equal(std::ranges::count(ranks, other), is_partner ? 1 : 0, "is in the list");
      }
    }
    for (int rail = 0; rail < hosts.num_rails(); ++rail) {
      for (int host = 0; host < hosts.num_hosts(); ++host) {
        for (int other = 0; other < hosts.num_hosts(); ++other) {
          if (host == other) continue;
          check_equal(hosts.partner_of(hosts.rank_at(host, rail), other),
                      hosts.rank_at(other, rail), "partner on a rail");
        }
      }
    }
  }
}

void groups_are_consecutive_and_equal() {
  check(hosts_of("aabb").are_groups_of(2), "two hosts of two");
  check(!hosts_of("aabb").are_groups_of(4), "two hosts are not one group");
  check(!hosts_of("abab").are_groups_of(2), "interleaved ranks");
  check(!hosts_of("aab").are_groups_of(2), "a short host");
}

// The sum in a tree, as text.
std::string in_tree(std::vector<std::string> summands) {
  if (summands.size() == 1) return summands[0];
  const auto middle = summands.begin() + static_cast<long>((summands.size() + 1) / 2);
  return "(" + in_tree({summands.begin(), middle}) + in_tree({middle, summands.end()}) + ")";
}

void nodes_of_a_tree_are_those_whose_sums_nest() {
  for (const char* letters :
       {"a", "ab", "aab", "aabb", "abab", "aaab", "aabbc", "aabbcc", "abc", "aabbccdd", "aaaabbbb",
        "aaabbb", "aabbb", "aaaaabbbb", "abbccdd", "aabcdef", "aabbcdef"}) {
    const Hosts hosts = hosts_of(letters);
    std::vector<std::string> ranks, sums_of_hosts;
    for (int rank = 0; rank < hosts.world_size(); ++rank) ranks.push_back(std::to_string(rank));
    for (int host = 0; host < hosts.num_hosts(); ++host) {
      std::vector<std::string> summands;
      for (const int rank : hosts.ranks_of(host)) summands.push_back(std::to_string(rank));
      sums_of_hosts.push_back(in_tree(summands));
    }
    check_equal(hosts.are_nodes_of_tree(), in_tree(sums_of_hosts) == in_tree(ranks), letters);
  }
}

// The NUMA node of a rank that may run on these CPUs, given the CPUs of each node.
std::optional<int> node_of(const std::vector<int>& cpus, const std::vector<std::string>& cpulists) {
  const TemporaryDirectory directory;
  for (size_t node = 0; node < cpulists.size(); ++node) {
    const auto of_node = directory.path() / join("node", node);
    std::filesystem::create_directory(of_node);
    std::ofstream(of_node / "cpulist") << cpulists[node] << '\n';
  }
  std::ofstream(directory.path() / "online") << "0\n";
  return transport::numa_node_of(cpus, directory.path());
}

void node_of_a_rank_holds_all_its_cpus() {
  check(node_of({0}, {"0-3"}) == std::nullopt, "one node");
  check(node_of({2, 5}, {"0-1,4", "2-3,5", ""}) == 1, "one of two; the last has memory alone");
  check(node_of({0, 4}, {"0-1,4", "2-3,5"}) == 0, "the first");
  check(node_of({1, 2}, {"0-1", "2-3"}) == std::nullopt, "on both");
  check(node_of({}, {"0-1", "2-3"}) == std::nullopt, "unknown CPUs");
  check(transport::numa_node_of({0}, "/nowhere") == std::nullopt, "no directory");
}

const CaseTable kCases{
    {"hosts_numbered", hosts_are_numbered_by_their_lowest_rank},
    {"hosts_partners", partners_are_found_from_both_sides},
    {"hosts_groups", groups_are_consecutive_and_equal},
    {"hosts_tree", nodes_of_a_tree_are_those_whose_sums_nest},
    {"hosts_numa_node", node_of_a_rank_holds_all_its_cpus},
};

}  // namespace
}  // namespace rota::test
