// Parses the options of collectives from Python's names and dtypes. "auto" lets core/plan.h choose
// the algorithm. Each throws Error for unknown names.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "core/plan.h"
#include "schedule/cost.h"
#include "schedule/tuning.h"

namespace rota::tensors {

ReduceOp parse_op(std::string_view collective, std::string_view op);
AllReduceOptions parse_all_reduce_options(std::string_view op, std::string_view algorithm,
                                          std::optional<at::ScalarType> wire_dtype,
                                          std::optional<at::ScalarType> hop_dtype = std::nullopt,
                                          const OrderOptions& order = {});
// order: "rank" or "tree".
OrderOptions parse_order(std::string_view collective, std::string_view order,
                         std::optional<int64_t> group_size, std::optional<int64_t> num_shards);
// block_scaling: none is where the wire is narrow.
WireFormat parse_wire(std::string_view collective, at::ScalarType wire_dtype,
                      std::optional<bool> block_scaling);
// The wire between hosts; none if dtype is none.
std::optional<WireFormat> parse_inter_wire(std::optional<at::ScalarType> dtype, bool block_scaling);
BucketOptions parse_bucket_options(at::ScalarType wire_dtype, bool block_scaling,
                                   const BucketPass& pass, std::string_view algorithm,
                                   const OrderOptions& order);

// Returns the tuning table's row for these; topology: "local", "nvlink" or "pcie".
schedule::Tuning gpu_tuning(std::string_view gpu, std::string_view topology, int world_size);

// Returns the cost of a collective on GPUs; what: one of schedule::kCostNames.
schedule::Cost cost(std::string_view what, double tensor, double wire, double hop, int world_size,
                    int group_size);

}  // namespace rota::tensors
