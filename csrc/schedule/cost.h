// What a collective on GPUs moves, in closed form: for tables (benchmarks/paper.py) and for whoever
// plans which one to run. Counted in one round, without rounding up to chunks and granules.
//
// Every ordered pair of ranks is a first-in-first-out link: the sender stores a message into a slot
// in the receiver's memory, and the receiver loads it from there.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace rota::schedule {

// Bytes of one message: as the tensor holds it, as contributions and results travel, as partial
// sums travel.
struct MessageBytes {
  double tensor;
  double wire;
  double hop;
};

// Of the busiest rank, unless it says otherwise.
struct Cost {
  double links_out_bytes = 0;  // what it stores into peers' memory, and they load from its own
  double links_in_bytes = 0;
  // In its memory, whoever loads or stores; no cache is assumed to save any.
  double memory_read_bytes = 0;
  double memory_written_bytes = 0;
  double memory_bytes_of_all = 0;  // read and written, of all ranks together
  int num_messages = 0;            // each with one flag (low_latency: one in each packet)
  // The longest chain of waits, each for what a rank did after the one before.
  int num_waits = 0;
};

enum class CostOf : uint8_t {
  kOneShot,
  kLowLatency,
  kTwoShot,
  kTwoShotInPlace,
  kLocalTwoShotInPlace,
  kRing,
  kOrderedRing,
  kHierarchical,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kSendRecv,
};
inline constexpr std::array<std::string_view, 12> kCostNames{
    "one_shot",  "low_latency",  "two_shot",     "two_shot_in_place", "local two_shot_in_place",
    "ring",      "ordered_ring", "hierarchical", "reduce_scatter",    "all_gather",
    "broadcast", "send_recv"};

constexpr std::optional<CostOf> parse_cost(std::string_view text) {
  for (size_t i = 0; i < kCostNames.size(); ++i) {
    if (kCostNames[i] == text) return static_cast<CostOf>(i);
  }
  return std::nullopt;
}

// Where every rank sends and receives the same: through_links bytes in either direction, which lie
// in slots on their way, beside what it reads and writes of tensors and of memory of its own.
constexpr Cost even_cost(double num_ranks, double through_links, double read, double written,
                         int num_messages, int num_waits) {
  return {.links_out_bytes = through_links,
          .links_in_bytes = through_links,
          .memory_read_bytes = read + through_links,
          .memory_written_bytes = written + through_links,
          .memory_bytes_of_all = num_ranks * (read + written + 2 * through_links),
          .num_messages = num_messages,
          .num_waits = num_waits};
}

// world_size: 2 or more, and for kHierarchical a multiple of group_size.
constexpr Cost cost(CostOf what, const MessageBytes& bytes, int world_size, int group_size) {
  const auto [tensor, wire, hop] = bytes;
  const double ranks = world_size;
  const double group_ranks = group_size;
  const int peers = world_size - 1;
  const double others_share = peers / ranks;  // of a tensor in shards
  switch (what) {
    // The own contribution is read twice: to be sent, and to be summed.
    case CostOf::kOneShot:
      return even_cost(ranks, peers * wire, 2 * tensor, tensor, peers, 1);
    // In packets of 8 bytes, 4 of data and 4 of flag.
    case CostOf::kLowLatency:
      return even_cost(ranks, 2 * peers * wire, 2 * tensor, tensor, peers, 1);
    case CostOf::kTwoShot:
      return even_cost(ranks, 2 * others_share * wire, tensor, tensor, 2 * peers, 2);
    // From tensor to tensor, without slots; messages are bare flags.
    case CostOf::kTwoShotInPlace:
      return {.links_out_bytes = 2 * others_share * tensor,
              .links_in_bytes = 2 * others_share * tensor,
              .memory_read_bytes = tensor,
              .memory_written_bytes = tensor,
              .memory_bytes_of_all = ranks * 2 * tensor,
              .num_messages = 2 * peers,
              .num_waits = 2};
    // Of ranks of one launch: stream order and the end of the kernel say it all.
    case CostOf::kLocalTwoShotInPlace:
      return even_cost(ranks, 0, tensor, tensor, 0, 0);
    case CostOf::kRing:
      return even_cost(ranks, others_share * (hop + wire), tensor, tensor, 2 * peers, 2 * peers);
    // The first rank receives no partial sum, and the last one no result.
    case CostOf::kOrderedRing: {
      const double through_links = world_size == 2 ? (hop > wire ? hop : wire) : hop + wire;
      Cost cost =
          even_cost(ranks, through_links, tensor, tensor, world_size == 2 ? 1 : 2, 2 * peers);
      cost.memory_bytes_of_all = ranks * 2 * tensor + 2 * peers * (hop + wire);
      return cost;
    }
    // Partial sums of groups go unrounded, everybody's to everybody; the own one is kept meanwhile.
    case CostOf::kHierarchical: {
      const double groups = ranks / group_ranks;
      const double kept = groups > 1 ? hop / group_ranks : 0;
      return even_cost(
          ranks, 2 * (group_ranks - 1) / group_ranks * wire + (groups - 1) / group_ranks * hop,
          tensor + kept, tensor + kept, 2 * (group_size - 1) + world_size / group_size - 1,
          (group_size > 1 ? 2 : 0) + (groups > 1 ? 1 : 0));
    }
    // tensor: all shards.
    case CostOf::kReduceScatter:
      return even_cost(ranks, others_share * wire, tensor, tensor / ranks, peers, 1);
    case CostOf::kAllGather:
      return even_cost(ranks, others_share * wire, tensor / ranks, tensor, peers, 1);
    // A chain along the ring: busiest is a rank in its middle, which sends on from the slot.
    case CostOf::kBroadcast: {
      Cost cost = even_cost(ranks, wire, 0, tensor, 1, peers);
      cost.memory_bytes_of_all = tensor + peers * (tensor + 2 * wire);
      return cost;
    }
    // Of two ranks: one sends, the other receives.
    case CostOf::kSendRecv: {
      Cost cost = even_cost(1, wire, 0, tensor, 1, 1);
      cost.memory_bytes_of_all = 2 * tensor + 2 * wire;
      return cost;
    }
  }
  return {};
}

}  // namespace rota::schedule
