#include "tensor/options.h"

#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

// Returns the parsed value, or throws an error that lists the valid names.
template <typename Value, typename Names>
Value parse_name(std::string_view collective, std::string_view what, std::string_view text,
                 std::string_view default_name, const Names& names) {
  const auto found = std::ranges::find(names, text);
  if (found != names.end()) return static_cast<Value>(found - names.begin());
  std::string expected{default_name};
  for (const std::string_view name : names) expected += join(expected.empty() ? "" : ", ", name);
  throw Error(ErrorKind::kValue, join("rota.", collective, ": ", what, " is '", text,
                                      "', expected one of ", expected));
}

std::optional<schedule::Algorithm> parse_algorithm(std::string_view collective,
                                                   std::string_view text) {
  if (text == "auto") return std::nullopt;
  return parse_name<schedule::Algorithm>(collective, "algorithm", text, "auto",
                                         schedule::kAlgorithmNames);
}

std::optional<DType> optional_dtype(const std::optional<at::ScalarType>& dtype,
                                    std::string_view what) {
  if (!dtype) return std::nullopt;
  return reducible_dtype(*dtype, "all_reduce", what);
}

}  // namespace

ReduceOp parse_op(std::string_view collective, std::string_view op) {
  return parse_name<ReduceOp>(collective, "op", op, "", kReduceOpNames);
}

AllReduceOptions parse_all_reduce_options(std::string_view op, std::string_view algorithm,
                                          std::optional<at::ScalarType> wire_dtype,
                                          std::optional<at::ScalarType> hop_dtype,
                                          const OrderOptions& order) {
  return {.op = parse_op("all_reduce", op),
          .algorithm = parse_algorithm("all_reduce", algorithm),
          .wire = optional_dtype(wire_dtype, "wire_dtype"),
          .hop = optional_dtype(hop_dtype, "hop_dtype"),
          .order = order};
}

OrderOptions parse_order(std::string_view collective, std::string_view order,
                         std::optional<int64_t> group_size, std::optional<int64_t> num_shards) {
  constexpr std::array<std::string_view, 2> kNames{"rank", "tree"};
  return {.is_tree = parse_name<bool>(collective, "order", order, "", kNames),
          .group_size = group_size,
          .num_shards = num_shards};
}

WireFormat parse_wire(std::string_view collective, at::ScalarType wire_dtype,
                      std::optional<bool> block_scaling) {
  const DType dtype = known_dtype(wire_dtype, collective, "wire_dtype", is_wire_dtype);
  return {dtype, block_scaling.value_or(has_block_scaling(dtype))};
}

std::optional<WireFormat> parse_inter_wire(std::optional<at::ScalarType> dtype,
                                           bool block_scaling) {
  if (!dtype) return std::nullopt;
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorKind::kType, "rota.Communicator: " + what);
  };
  if (*dtype == at::kDouble) {
    refuse(
        "inter_wire_dtype is torch.float64, expected one that is narrower than a sum: "
        "torch.float32, torch.float16, torch.bfloat16 or a float8");
  }
  const WireFormat wire = parse_wire("Communicator", *dtype, block_scaling);
  if (block_scaling && !has_block_scaling(wire.dtype)) {
    refuse(
        join("inter_block_scaling is for torch.float16 and float8, expected none with "
             "inter_wire_dtype ",
             name(wire.dtype), ", which has the range of float32"));
  }
  return wire;
}

BucketOptions parse_bucket_options(at::ScalarType wire_dtype, bool block_scaling,
                                   const BucketPass& pass, std::string_view algorithm,
                                   const OrderOptions& order) {
  return {.wire = parse_wire("reduce_bucket", wire_dtype, block_scaling),
          .pass = pass,
          .algorithm = parse_algorithm("reduce_bucket", algorithm),
          .order = order};
}

schedule::Tuning gpu_tuning(std::string_view gpu, std::string_view topology, int world_size) {
  const auto parsed = parse_name<schedule::Topology>("gpu_tuning", "topology", topology, "",
                                                     schedule::kTopologyNames);
  const auto tuning = schedule::find_tuning(gpu, parsed, world_size);
  if (!tuning) {
    throw Error(ErrorKind::kValue, join("rota.gpu_tuning: world_size is ", world_size,
                                        ", expected 1 to ", kMaxWorldSize));
  }
  return *tuning;
}

schedule::Cost cost(std::string_view what, double tensor, double wire, double hop, int world_size,
                    int group_size) {
  const auto parsed = parse_name<schedule::CostOf>("cost", "what", what, "", schedule::kCostNames);
  if (world_size < 2 || group_size < 1 || world_size % group_size != 0) {
    throw Error(ErrorKind::kValue,
                join("rota.cost: world_size is ", world_size, " and group_size ", group_size,
                     ", expected 2 ranks or more, and a divisor of their number"));
  }
  return schedule::cost(parsed, {tensor, wire, hop}, world_size, group_size);
}

}  // namespace rota::tensors
