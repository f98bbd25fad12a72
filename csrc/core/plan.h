// From what a caller chooses to a Call: what was left open is filled in, and what cannot be done is
// refused. The one place where that happens, for the CPU and for GPUs, and where the algorithm of
// an all-reduce is chosen, by the measurements of schedule/select.h.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "schedule/call.h"
#include "schedule/tuning.h"

namespace rota {

struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
  std::optional<DType> wire;                     // none: the tensor's dtype
  std::optional<DType> hop;                      // none: the accumulate dtype; only for ring
  std::optional<int64_t> group_size;             // none: no groups
};

struct BucketOptions {
  WireFormat wire;
  BucketPass pass;
  std::optional<schedule::Algorithm> algorithm;  // none: auto
};

class Planner {
 public:
  // What there is to choose from on a GPU.
  struct Gpu {
    schedule::Tuning tuning;
    uint64_t most_packet_bytes;  // that low_latency takes
    // What is wrong with the kernel of an algorithm; none: it can be trusted.
    std::function<std::optional<std::string>(schedule::Algorithm, const WireFormat&)> why_not;
  };

  explicit Planner(int world_size, std::optional<Gpu> gpu = std::nullopt)
      : world_size_(world_size), gpu_(std::move(gpu)) {}

  // Each throws Error(kType) or Error(kValue) for what cannot be done.
  Call all_reduce(DType dtype, uint64_t num_elems, const AllReduceOptions& options) const;
  Call reduce_bucket(DType dtype, uint64_t num_elems, const BucketOptions& options) const;
  Call broadcast(DType dtype, uint64_t num_elems, int root) const;
  Call all_gather(DType dtype, uint64_t num_elems) const;
  // num_elems: of the input.
  Call reduce_scatter(DType dtype, uint64_t num_elems, ReduceOp op) const;

 private:
  // Fills in the algorithm, by the call's wire format and length. Of those with the same bits it is
  // the fastest that can be trusted; where none can, it is one that cannot.
  void choose_algorithm(Call& call, std::optional<schedule::Algorithm> requested) const;
  schedule::Algorithm choose_on_gpu(const Call& call,
                                    std::optional<schedule::Algorithm> requested) const;

  int group_size(const Call& call, const AllReduceOptions& options) const;

  int world_size_;
  std::optional<Gpu> gpu_;  // none: for the CPU
};

}  // namespace rota
