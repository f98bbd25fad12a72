// What callers of a collective may choose, from the names that Python users write. "auto" leaves
// the algorithm open.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "cpu/all_reduce_args.h"
#include "schedule/select.h"
#include "schedule/tuning.h"

namespace rota::tensors {

struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  std::optional<schedule::Algorithm> algorithm;
  std::optional<at::ScalarType> wire_dtype;
  std::optional<at::ScalarType> hop_dtype;

  static AllReduceOptions parse(std::string_view op, std::string_view algorithm,
                                std::optional<at::ScalarType> wire_dtype,
                                std::optional<at::ScalarType> hop_dtype);
};

struct BucketOptions {
  at::Tensor stats;  // float64[2]: becomes the number of non-finite elements, the sum of squares
  at::ScalarType wire_dtype;
  bool block_scaling;
  cpu::BucketPass pass;                // all but the residual
  std::optional<at::Tensor> residual;  // float32, as many elements as the bucket
  std::optional<schedule::Algorithm> algorithm;

  static BucketOptions parse(at::Tensor stats, at::ScalarType wire_dtype, bool block_scaling,
                             const cpu::BucketPass& pass, std::optional<at::Tensor> residual,
                             std::string_view algorithm);
};

// The table's row; topology: "local", "nvlink" or "pcie".
schedule::Tuning gpu_tuning(std::string_view gpu, std::string_view topology, int world_size);

}  // namespace rota::tensors
