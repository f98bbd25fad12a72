// Ranks on several hosts as threads of this process: those of a host share plain memory, and a
// MemoryNetwork carries what goes between hosts.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "hosts/bridge.h"
#include "hosts/scratch.h"
#include "memory_network.h"
#include "ranks.h"

namespace rota::test {

struct HostRank {
  hosts::Bridge& bridge;
  hosts::Scratch scratch;

  int rank() const { return bridge.rank(); }
  void run(const Call& call, const cpu::Buffers& buffers);
  void barrier() { run({.kind = CollectiveKind::kBarrier}, {}); }
};

struct HostsOptions : RanksOptions {
  std::optional<int> cut_off;  // a rank that other hosts hear nothing of from the start
};

// Runs body on every rank, as run_ranks(). letters: the host of each rank (letters.h).
void run_on_hosts(std::string_view letters, const std::function<void(HostRank&)>& body,
                  const HostsOptions& options = {});

}  // namespace rota::test
