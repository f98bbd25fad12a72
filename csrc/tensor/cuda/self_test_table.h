// What the self-test of a GPU covers: every kernel in every format that it is compiled for. Knows
// nothing of how kernels are tested.
#pragma once

#include <string>
#include <vector>

#include "cuda/launch_plan.h"

namespace rota::tensors {

// A kernel in one format.
struct TestedKernel {
  enum class Role : uint8_t { kCollective, kPack, kUnpack };

  Role role;
  cuda::Kernel collective;  // of kCollective
  cuda::Sums sums;          // of kCollective
  DType gradients;          // of kPack and kUnpack
  WireFormat format;        // what travels between ranks

  std::string_view kernel() const;  // "two_shot", "pack"
  std::string to_string() const;    // "two_shot of float16", "two_shot of float16 in a tree"
};

// All of them, the formats of each kernel in a row. The order is the same wherever the same build
// runs.
const std::vector<TestedKernel>& tested_kernels();

}  // namespace rota::tensors
