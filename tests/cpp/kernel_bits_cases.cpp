// Numbers whose sums are rounded, including NaN, Inf and denormals: kernel bodies give the same
// bits as the CPU's collectives, and as scalars that are added in the same groups.
#include "calls.h"
#include "check.h"
#include "kernel_calls.h"

namespace rota::test {
namespace {

constexpr uint64_t kLengths[] = {700, 1, 2077, 130};

void have_the_bits_of_the_cpu(int world_size, size_t slot_bytes,
                              const std::vector<KernelCall>& calls) {
  HostGrid grid(
      {.world_size = world_size, .slot_bytes = slot_bytes, .packet_bytes = 2 * slot_bytes});
  std::vector<std::vector<uint64_t>> expected = cpu_bits(calls, world_size);
  std::vector<CheckedCall> checked;
  for (size_t i = 0; i < calls.size(); ++i) checked.push_back({calls[i], std::move(expected[i])});
  call_and_check(grid, checked);
}

// low_latency cannot use more blocks than a launch may have, so its tensors are short.
uint64_t length_of(Kernel kernel, uint64_t variant) {
  return kernel == Kernel::kLowLatency ? kLengths[variant % 4] % 128 + 1 : kLengths[variant % 4];
}

// With mixed numbers and another variant for each call.
void add(std::vector<KernelCall>& calls, int world_size, KernelCall call) {
  call.numbers = Numbers::kMixed;
  calls.push_back(varied(call, world_size, calls.size()));
  calls.back().num_elems = length_of(call.kernel, calls.size());
}

void every_dtype_and_op(int world_size) {
  std::vector<KernelCall> calls;
  for (const Kernel kernel : kAllReduceKernels) {
    for (const DType dtype : reducible_dtypes()) {
      for (const ReduceOp op : defined_ops(dtype)) {
        add(calls, world_size,
            {.kernel = kernel,
             .format = {dtype},
             .op = op,
             // Groups of one rank add in the same order as one group of all ranks.
             .group_size = kernel == Kernel::kHierarchical ? 1 : 0});
      }
    }
  }
  have_the_bits_of_the_cpu(world_size, kPlainSlotBytes, calls);
}

void every_bucket_format(int world_size) {
  std::vector<KernelCall> calls;
  for (const Kernel kernel : kAllReduceKernels) {
    for (const WireFormat& format : kBucketFormats) {
      if (!is_defined(kernel, format)) continue;
      for (uint64_t variant = 0; variant < 4; ++variant) {
        KernelCall call{.kernel = kernel,
                        .format = format,
                        .is_bucket = true,
                        .op = variant % 2 == 0 ? ReduceOp::kAvg : ReduceOp::kSum,
                        .group_size = kernel == Kernel::kHierarchical ? 1 : 0};
        const bool is_narrow = info(format.dtype).num_bytes < 4;
        if (variant >= 2 && is_narrow) call.stochastic_seed = variant;
        add(calls, world_size, call);
      }
    }
  }
  have_the_bits_of_the_cpu(world_size, kBucketSlotBytes, calls);
}

// Flat kernels with a group size add in the same groups as the hierarchical one.
void groups_of_two_in_four_ranks() {
  HostGrid grid({.world_size = 4, .slot_bytes = kPlainSlotBytes});
  std::vector<KernelCall> calls;
  for (const Kernel kernel : {Kernel::kOneShot, Kernel::kTwoShot, Kernel::kTwoShotInPlace,
                              Kernel::kHierarchical, Kernel::kLowLatency, Kernel::kReduceScatter}) {
    for (const int group_size : {1, 2, 4}) {
      for (const DType dtype :
           {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kFloat8E5M2, DType::kInt32}) {
        add(calls, 4,
            {.kernel = kernel,
             .format = {dtype},
             .op = info(dtype).is_floating ? ReduceOp::kAvg : ReduceOp::kSum,
             .group_size = group_size});
        calls.back().num_elems = 4 * (calls.back().num_elems / 4 + 1);
      }
    }
  }
  call_and_check(grid, calls);

  KernelCall call{.num_elems = 1000, .group_size = 2, .numbers = Numbers::kMixed};
  const std::vector<uint64_t> in_groups = expected_bits(call, 4);
  call.group_size = 4;
  check(in_groups != expected_bits(call, 4), "sums in groups have bits of their own");
}

constexpr Kernel kTreeKernels[] = {Kernel::kOneShot, Kernel::kTwoShot, Kernel::kTwoShotInPlace,
                                   Kernel::kLowLatency};

// Along a tree, kernels have the bits of the CPU's order="tree". With four ranks groups of two
// would do, but the self-test of a GPU asks for the tree.
void trees(int world_size) {
  std::vector<KernelCall> plain, buckets, shards;
  for (const Kernel kernel : kTreeKernels) {
    for (const DType dtype : reducible_dtypes()) {
      const bool is_floating = info(dtype).is_floating;
      add(plain, world_size,
          {.kernel = kernel,
           .format = {dtype},
           .op = is_floating ? ReduceOp::kAvg : ReduceOp::kSum,
           .is_tree = true});
      if (kernel != Kernel::kOneShot) continue;
      add(shards, world_size,
          {.kernel = Kernel::kReduceScatter, .format = {dtype}, .is_tree = true});
      shards.back().num_elems = static_cast<uint64_t>(world_size) *
                                (shards.back().num_elems / static_cast<uint64_t>(world_size) + 1);
    }
    for (const WireFormat& format : kBucketFormats) {
      if (!is_defined(kernel, format)) continue;
      add(buckets, world_size,
          {.kernel = kernel,
           .format = format,
           .is_bucket = true,
           .op = ReduceOp::kAvg,
           .is_tree = true});
    }
  }
  have_the_bits_of_the_cpu(world_size, kPlainSlotBytes, plain);
  have_the_bits_of_the_cpu(world_size, kBucketSlotBytes, buckets);
  HostGrid grid({.world_size = world_size, .slot_bytes = kPlainSlotBytes});
  call_and_check(grid, shards);

  KernelCall call{.num_elems = 1000, .is_tree = true, .numbers = Numbers::kMixed};
  const std::vector<uint64_t> in_tree = expected_bits(call, world_size);
  call.is_tree = false;
  check(in_tree != expected_bits(call, world_size), "sums along a tree have bits of their own");
}

const CaseTable kCases{
    {"kernel_bits_of_cpu-ws2", every_dtype_and_op, 2},
    {"kernel_bits_of_cpu-ws3", every_dtype_and_op, 3},
    {"kernel_bits_of_cpu-ws4", every_dtype_and_op, 4},
    {"kernel_bits_of_cpu-buckets-ws2", every_bucket_format, 2},
    {"kernel_bits_of_cpu-buckets-ws3", every_bucket_format, 3},
    {"kernel_bits_of_cpu-buckets-ws4", every_bucket_format, 4},
    {"kernel_bits_of_groups-ws4", groups_of_two_in_four_ranks},
    {"kernel_bits_of_trees-ws4", trees, 4},
    {"kernel_bits_of_trees-ws5", trees, 5},
    {"kernel_bits_of_trees-ws7", trees, 7},
    {"kernel_bits_of_trees-ws8", trees, 8},
    {"kernel_bits_of_trees-ws16", trees, 16},
};

}  // namespace
}  // namespace rota::test
