// Runs one collective in a test: inputs whose result is exact in every dtype, the call on one rank,
// and a bit-exact check of its result.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "random.h"

namespace rota::test {

struct TestCall {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  uint64_t num_elems = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::optional<schedule::Algorithm> algorithm;
  std::optional<DType> wire;
  bool block_scaling = false;  // of reduce_bucket and all_gather
  std::optional<DType> hop;
  int root = 0;
  size_t misalignment = 0;  // bytes in front of the tensor
  int node_size = 0;        // of a sum in two levels: ranks of a NUMA node
  uint64_t in_heap = 0;     // bit mask of the ranks whose tensors peers can read in place

  std::string to_string() const;
};

// A rank that can make calls.
struct Caller {
  int rank;
  int world_size;
  std::function<void(const Call&, const cpu::Buffers&)> run;
};

// Makes the call and checks its result. The seed picks the numbers and is the same on all ranks.
void call_and_check(const Caller& caller, const TestCall& call, uint64_t seed);
void call_and_check(Communicator& communicator, const TestCall& call, uint64_t seed,
                    CallerThread thread = CallerThread::kUser);

// A call of random kind, dtype and algorithm, with a length from 0 to several slots. The same on
// all ranks that pass the same random state.
TestCall random_call(Random& random, int world_size);

// Makes random calls until their error says that the group was aborted, which the rank `group` %
// world_size does at some moment, after up to most_us.
void call_until_aborted(int rank, int world_size, int group, int most_us,
                        const std::function<void(const char*)>& abort,
                        const std::function<void(const TestCall&, uint64_t)>& call);

inline constexpr schedule::Algorithm kAlgorithms[] = {
    schedule::Algorithm::kOneShot, schedule::Algorithm::kTwoShot, schedule::Algorithm::kOrderedRing,
    schedule::Algorithm::kRing};

std::vector<DType> reducible_dtypes();
std::vector<ReduceOp> defined_ops(DType dtype);

}  // namespace rota::test
