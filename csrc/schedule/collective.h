// Every collective, as one row of a table: who contributes, who receives, in how many parts.
// Checks, planning, packing, staging and error messages follow from the row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace rota {

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kReduceBucket,
  kReduceShards,
  kUpdateShards,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kSendRecv,
  kBarrier,
};

enum class Ranks : uint8_t { kNone, kAll, kRoot, kAllButRoot };

struct CollectiveRow {
  std::string_view title;   // as profilers show it; a literal, so zero-terminated
  Ranks contributors;       // whose inputs are read
  Ranks receivers;          // whose outputs are written
  bool is_in_place;         // the one tensor is input and output
  bool is_input_per_rank;   // a part for each rank; otherwise one tensor for all
  bool is_output_per_rank;  // likewise
  bool reduces;

  constexpr std::string_view name() const { return {title.data() + 5, title.size() - 5}; }
  constexpr bool has_root() const { return is_of_root(contributors) || is_of_root(receivers); }

 private:
  static constexpr bool is_of_root(Ranks ranks) {
    return ranks == Ranks::kRoot || ranks == Ranks::kAllButRoot;
  }
};

// By CollectiveKind. A transfer between two ranks is no collective; its row only names it.
inline constexpr std::array<CollectiveRow, 13> kCollectives{{
    {"rota:all_reduce", Ranks::kAll, Ranks::kAll, true, false, false, true},
    {"rota:reduce_bucket", Ranks::kAll, Ranks::kAll, true, false, false, true},
    {"rota:reduce_shards", Ranks::kAll, Ranks::kAll, true, false, false, true},
    {"rota:update_shards", Ranks::kAll, Ranks::kAll, true, false, false, false},
    {"rota:reduce", Ranks::kAll, Ranks::kRoot, true, false, false, true},
    {"rota:reduce_scatter", Ranks::kAll, Ranks::kAll, false, true, false, true},
    {"rota:broadcast", Ranks::kRoot, Ranks::kAllButRoot, true, false, false, false},
    {"rota:all_gather", Ranks::kAll, Ranks::kAll, false, false, true, false},
    {"rota:gather", Ranks::kAll, Ranks::kRoot, false, false, true, false},
    {"rota:scatter", Ranks::kRoot, Ranks::kAll, false, true, false, false},
    {"rota:all_to_all", Ranks::kAll, Ranks::kAll, false, true, true, false},
    {"rota:send_recv", Ranks::kNone, Ranks::kNone, true, false, false, false},
    {"rota:barrier", Ranks::kNone, Ranks::kNone, true, false, false, false},
}};

constexpr const CollectiveRow& row_of(CollectiveKind kind) {
  return kCollectives[static_cast<size_t>(kind)];
}

constexpr std::string_view name(CollectiveKind kind) { return row_of(kind).name(); }

// Whether `rank` is among `ranks`.
constexpr bool is_among(Ranks ranks, int rank, int root) {
  switch (ranks) {
    case Ranks::kNone:
      return false;
    case Ranks::kAll:
      return true;
    case Ranks::kRoot:
      return rank == root;
    case Ranks::kAllButRoot:
      return rank != root;
  }
  return false;
}

}  // namespace rota
