// The self-test's launches: small tensors that hold what kernels get wrong first (numbers that
// round, denormals, negative zeros, Inf, NaN; lengths and starts that are no multiples of 16 bytes)
// and what each launch must leave behind, computed by the CPU's own loops in the same order of
// sums. Knows nothing of streams, time or what becomes of a failure.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/executor.h"
#include "tensor/cuda/self_test_table.h"

namespace rota::tensors {

// Ranks of one launch: hierarchical needs groups of more than one, and orders of sums show from
// three on.
inline constexpr int kSelfTestRanks = 4;

// Part of what a launch leaves behind.
struct TrialResult {
  size_t offset;  // in the trials' memory
  uint64_t num_elems;
  DType dtype;
  std::string place;  // "of local rank 2"
};

struct Trial {
  size_t number;  // in tested_kernels()
  std::vector<TrialResult> results;
  // Queues it on the stream; `memory` is where the trials' memory lies on the GPU.
  std::function<void(std::byte* memory, cuda::Executor& executor, cuda::Stream stream)> launch;
};

// Trials whose data share one allocation.
struct Trials {
  std::vector<std::byte> before, expected;  // the allocation's contents, around the launches
  std::vector<Trial> trials;
};

// Of these kernels: places in tested_kernels(), from begin to end.
Trials make_trials(size_t begin, size_t end);

// What the first wrong element of a result is and should be; empty where all have the expected
// bits. Any NaN is as good as another. memory: as `expected`.
std::string find_difference(const TrialResult& result, const std::vector<std::byte>& memory,
                            const std::vector<std::byte>& expected);

}  // namespace rota::tensors
