// Which ranks share a host. Hosts are numbered by their lowest rank, and the ranks of a host by
// their rank in the group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "schedule/sum_order.h"

namespace rota::schedule {

class Hosts {
 public:
  // ids: each rank's host, by rank.
  explicit Hosts(std::span<const std::string> ids) {
    for (const std::string& id : ids) {
      const auto host = static_cast<size_t>(std::ranges::find(ids_, id) - ids_.begin());
      if (host == ids_.size()) {
        ids_.push_back(id);
        ranks_.emplace_back();
      }
      places_.push_back({static_cast<int>(host), static_cast<int>(ranks_[host].size())});
      ranks_[host].push_back(static_cast<int>(places_.size()) - 1);
    }
  }

  struct Place {
    int host;
    int local_rank;
  };

  int num_hosts() const { return static_cast<int>(ranks_.size()); }
  int world_size() const { return static_cast<int>(places_.size()); }
  const Place& place_of(int rank) const { return places_[static_cast<size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_[static_cast<size_t>(host)]; }
  bool share_host(std::span<const int> ranks) const {
    return std::ranges::all_of(
        ranks, [&](int rank) { return place_of(rank).host == place_of(ranks[0]).host; });
  }
  int local_size(int host) const { return static_cast<int>(ranks_of(host).size()); }
  int rank_at(int host, int local_rank) const {
    return ranks_of(host)[static_cast<size_t>(local_rank)];
  }

  // "rank 3 on host 1".
  std::string describe(int rank) const {
    return "rank " + std::to_string(rank) + " on host " + std::to_string(place_of(rank).host);
  }
  // "host 0 'alpha' (ranks 0 1), host 1 'beta' (ranks 2 3)".
  std::string to_string() const {
    std::string text;
    for (size_t host = 0; host < ids_.size(); ++host) {
      text +=
          (host > 0 ? ", host " : "host ") + std::to_string(host) + " '" + ids_[host] + "' (ranks";
      for (const int rank : ranks_[host]) text += ' ' + std::to_string(rank);
      text += ')';
    }
    return text;
  }

  // A rail joins one rank of each host: those with its number as local rank.
  int num_rails() const {
    size_t fewest = places_.size();
    for (const auto& ranks : ranks_) fewest = std::min(fewest, ranks.size());
    return static_cast<int>(fewest);
  }
  // The rank of another host that a rank exchanges whole-host data with. Where that host has fewer
  // ranks, several share one of its ranks.
  int partner_of(int rank, int host) const {
    return rank_at(host, place_of(rank).local_rank % local_size(host));
  }
  // The ranks of other hosts whose partner a rank is.
  std::vector<int> whose_partner_is(int rank) const {
    const int host = place_of(rank).host;
    std::vector<int> ranks;
    for (int other = 0; other < world_size(); ++other) {
      if (place_of(other).host != host && partner_of(other, host) == rank) ranks.push_back(other);
    }
    return ranks;
  }

  // Whether all hosts have as many ranks, with consecutive numbers.
  bool are_groups_of(int group_size) const {
    if (world_size() != num_hosts() * group_size) return false;
    for (int rank = 0; rank < world_size(); ++rank) {
      const Place& place = place_of(rank);
      if (place.host != rank / group_size || place.local_rank != rank % group_size) return false;
    }
    return true;
  }

  // Whether each host's ranks are all ranks under one node of a balanced tree over the group, whose
  // nodes above the hosts form the balanced tree over the hosts. Then the sum in the tree is the
  // sum over the hosts of the sums within them, each in its own tree.
  bool are_nodes_of_tree() const {
    const SumOrder tree{.num_shards = 1u << 31};
    int first = 0;
    for (int host = 0; host < num_hosts(); ++host) {
      const int size = local_size(host);
      for (int local_rank = 0; local_rank < size; ++local_rank) {
        const int rank = first + local_rank;
        if (rank_at(host, local_rank) != rank) return false;
        int num = num_additions(tree, size, local_rank);
        if (local_rank == size - 1) num += num_additions(tree, num_hosts(), host);
        if (num != num_additions(tree, world_size(), rank)) return false;
      }
      first += size;
    }
    return true;
  }

 private:
  std::vector<Place> places_;            // by rank
  std::vector<std::vector<int>> ranks_;  // by host, as the next one
  std::vector<std::string> ids_;
};

}  // namespace rota::schedule
