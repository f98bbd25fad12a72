// Which host a process is on, and to which of its NUMA nodes it is bound.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace rota::transport {

// Equal for processes that can share memory: the kernel's boot id and the network namespace of the
// sockets. ROTA_HOST_ID overrides it.
std::string host_id();

// The NUMA node that a rank is on: it is bound to CPUs of that node alone, of several with CPUs;
// or ROTA_NUMA_NODE names it.
struct NumaNode {
  std::optional<int> number;
  bool is_set_by_hand = false;
};
// The calling thread's node. Throws Error(kTransport) if ROTA_NUMA_NODE is no number.
NumaNode numa_node();
// The node in `directory`, which has a nodeN/cpulist for each, that holds all these CPUs; none if
// no node does, or if fewer than two have CPUs.
std::optional<int> numa_node_of(const std::vector<int>& cpus, const std::string& directory);

}  // namespace rota::transport
