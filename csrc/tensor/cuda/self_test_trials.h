// The self-test's launches: small tensors whose lengths and starts are no multiples of 16 bytes,
// and the expected contents after each launch. Knows nothing of streams, time or the handling of
// failures.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/executor.h"
#include "tensor/cuda/self_test_table.h"

namespace rota::tensors {

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
  std::vector<std::byte> before, expected;  // the allocation's contents, before and after launches
  std::vector<Trial> trials;
};

// Makes the trials of the kernels tested_kernels()[begin] to tested_kernels()[end - 1].
Trials make_trials(size_t begin, size_t end);

// Describes the first wrong element of a result: its bits and the expected ones. Empty if all bits
// are as expected; any NaN equals any other. memory: laid out as `expected`.
std::string find_difference(const TrialResult& result, const std::vector<std::byte>& memory,
                            const std::vector<std::byte>& expected);

}  // namespace rota::tensors
