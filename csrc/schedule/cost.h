// What a collective on GPUs moves, in closed form: for tables (benchmarks/paper.py) and for
// choosing which one to run. Counts one round, without rounding up to chunks and granules.
//
// Every ordered pair of ranks is a first-in-first-out link: the sender stores a message into a slot
// in the receiver's memory, and the receiver loads it from there.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace rota::schedule {

// Bytes of one message: in the tensor's dtype, in the wire format of contributions and results, and
// in the dtype of partial sums.
struct MessageBytes {
  double tensor;
  double wire;
  double hop;
};

// For the busiest rank, unless a field says otherwise.
struct Cost {
  double links_out_bytes = 0;  // what it stores into peers' memory plus what they load from its own
  double links_in_bytes = 0;
  // Traffic of its memory, by any rank; caches are assumed to save nothing.
  double memory_read_bytes = 0;
  double memory_written_bytes = 0;
  double memory_bytes_of_all = 0;  // read and written, all ranks together
  int num_messages = 0;            // each with one flag (low_latency: one in each packet)
  // The longest chain of waits in which each depends on the one before.
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

// The cost where every rank sends and receives equally: through_links bytes each way, which pass
// through slots, plus what it reads and writes in tensors and in its own memory.
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
    // A rank reads its own contribution twice: to send it, and to sum it.
    case CostOf::kOneShot:
      return even_cost(ranks, peers * wire, 2 * tensor, tensor, peers, 1);
    // In packets of 8 bytes, 4 of data and 4 of flag.
    case CostOf::kLowLatency:
      return even_cost(ranks, 2 * peers * wire, 2 * tensor, tensor, peers, 1);
    case CostOf::kTwoShot:
      return even_cost(ranks, 2 * others_share * wire, tensor, tensor, 2 * peers, 2);
    // From tensor to tensor, without slots; messages are flags without data.
    case CostOf::kTwoShotInPlace:
      return {.links_out_bytes = 2 * others_share * tensor,
              .links_in_bytes = 2 * others_share * tensor,
              .memory_read_bytes = tensor,
              .memory_written_bytes = tensor,
              .memory_bytes_of_all = ranks * 2 * tensor,
              .num_messages = 2 * peers,
              .num_waits = 2};
    // The ranks share one launch: stream order and the end of the kernel replace all messages.
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
    // Groups exchange unrounded partial sums, all to all; each rank also stores its own.
    case CostOf::kHierarchical: {
      const double groups = ranks / group_ranks;
      const double kept = groups > 1 ? hop / group_ranks : 0;
      return even_cost(
          ranks, 2 * (group_ranks - 1) / group_ranks * wire + (groups - 1) / group_ranks * hop,
          tensor + kept, tensor + kept, 2 * (group_size - 1) + world_size / group_size - 1,
          (group_size > 1 ? 2 : 0) + (groups > 1 ? 1 : 0));
    }
    // `tensor` counts all shards.
    case CostOf::kReduceScatter:
      return even_cost(ranks, others_share * wire, tensor, tensor / ranks, peers, 1);
    case CostOf::kAllGather:
      return even_cost(ranks, others_share * wire, tensor / ranks, tensor, peers, 1);
    // A chain along the ring. The busiest rank is one in the middle, which forwards from its slot.
    case CostOf::kBroadcast: {
      Cost cost = even_cost(ranks, wire, 0, tensor, 1, peers);
      cost.memory_bytes_of_all = tensor + peers * (tensor + 2 * wire);
      return cost;
    }
    // Between two ranks: one sends, the other receives.
    case CostOf::kSendRecv: {
      Cost cost = even_cost(1, wire, 0, tensor, 1, 1);
      cost.memory_bytes_of_all = 2 * tensor + 2 * wire;
      return cost;
    }
  }
  return {};
}

}  // namespace rota::schedule
