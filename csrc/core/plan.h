// Turns a caller's options into a Call: fills in defaults and refuses what is not supported. The
// one place where that happens for CPU and GPUs, and where the algorithm of an all-reduce is
// chosen, from the measurements in schedule/select.h.
#pragma once

#include <optional>

#include "schedule/call.h"
#include "schedule/tuning.h"

namespace rota {

// The order of a sum; schedule/sum_order.h.
struct OrderOptions {
  bool is_tree = false;
  std::optional<int64_t> group_size;  // none: no groups
  std::optional<int64_t> num_shards;  // only of a tree; none: as few as world_size allows
};

struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
  std::optional<DType> wire;                     // none: the tensor's dtype
  std::optional<DType> hop;                      // none: the accumulate dtype; only for ring
  OrderOptions order;
};

struct BucketOptions {
  WireFormat wire;
  BucketPass pass;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
  OrderOptions order;
};

class Planner {
 public:
  // The algorithms available on a GPU.
  struct Gpu {
    schedule::Tuning tuning;
    uint64_t most_packet_bytes;  // that low_latency takes
  };

  // node_size: how many consecutive ranks are on each of several NUMA nodes; 0: nodes are no level.
  explicit Planner(int world_size, std::optional<Gpu> gpu = std::nullopt, int node_size = 0)
      : world_size_(world_size), gpu_(std::move(gpu)), node_size_(node_size) {}

  int world_size() const { return world_size_; }

  // Each throws Error(kType) or Error(kValue) for unsupported arguments.
  Call all_reduce(DType dtype, uint64_t num_elems, const AllReduceOptions& options) const;
  Call reduce_bucket(DType dtype, uint64_t num_elems, const BucketOptions& options) const;
  // Any other collective. num_elems: as in Call; op and order: of those that reduce; root: of those
  // that have one; wire: of reduce_scatter (without scales) and all_gather, none: the tensor's
  // dtype.
  Call collective(CollectiveKind kind, DType dtype, uint64_t num_elems,
                  ReduceOp op = ReduceOp::kSum, int root = 0,
                  std::optional<WireFormat> wire = std::nullopt,
                  const OrderOptions& order = {}) const;
  void check_root(CollectiveKind kind, int root) const;

 private:
  // Chooses the fastest algorithm by the call's wire format, length and, for two levels, order; all
  // choices have the same bits.
  void choose_algorithm(Call& call, std::optional<schedule::Algorithm> requested) const;
  schedule::Algorithm choose_on_cpu(const Call& call) const;

  // Whether the sum over NUMA nodes of the sums within them has the bits of the call.
  bool allows_two_levels(const Call& call) const;
  void check_two_levels(const Call& call) const;

  schedule::SumOrder sum_order(const Call& call, const OrderOptions& options,
                               std::optional<schedule::Algorithm> requested) const;
  int group_size(const Call& call, int64_t num_ranks) const;
  uint32_t num_shards(const Call& call, std::optional<int64_t> num_shards) const;

  int world_size_;
  std::optional<Gpu> gpu_;  // none: for the CPU
  int node_size_;
};

}  // namespace rota
