// Runs one GPU collective in a test, on host threads: inputs, the launch of each rank, the expected
// result on all ranks, and a bit-exact check.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "host_grid.h"
#include "kernel_launch.h"

namespace rota::test {

inline constexpr Kernel kAllKernels[] = {
    Kernel::kOneShot,     Kernel::kTwoShot,      Kernel::kTwoShotInPlace, Kernel::kRing,
    Kernel::kOrderedRing, Kernel::kHierarchical, Kernel::kLowLatency,     Kernel::kReduceScatter,
    Kernel::kAllGather,   Kernel::kBroadcast,    Kernel::kTransfer};
inline constexpr auto kAllReduceKernels = std::span(kAllKernels).first<7>();

enum class Numbers : uint8_t { kExact, kMixed };

struct KernelCall {
  Kernel kernel = Kernel::kOneShot;
  WireFormat format{DType::kFloat32};
  // A gradient bucket: float32, rounded to the format in transit and cut into tiles.
  bool is_bucket = false;
  std::optional<uint64_t> stochastic_seed;  // buckets only
  ReduceOp op = ReduceOp::kSum;
  uint64_t num_elems = 0;  // of the longest tensor
  int group_size = 0;      // 0: all ranks are one group
  bool is_tree = false;    // instead of groups
  int num_blocks = 2;      // low_latency: set by its length instead
  int root = 0;
  int receiver = 1;         // of the root's data; with four ranks, the other two are a pair too
  size_t misalignment = 0;  // bytes in front of each tensor
  bool is_in_place = false;
  int late_rank = kNobody;
  Numbers numbers = Numbers::kExact;
  uint64_t seed = 0;

  std::string to_string() const;
};

inline constexpr WireFormat kBucketFormats[] = {
    {DType::kFloat32},          {DType::kFloat16},         {DType::kBFloat16},
    {DType::kFloat8E4M3},       {DType::kFloat8E5M2},      {DType::kFloat16, true},
    {DType::kFloat8E4M3, true}, {DType::kFloat8E5M2, true}};

// Whether this kernel exists for the format: low_latency has no packets for scales.
bool is_defined(Kernel kernel, const WireFormat& format);
// Changes misalignment, in-place use, root and number of blocks with the variant.
KernelCall varied(KernelCall call, int world_size, uint64_t variant);

// A bucket's slot holds a tile of partial sums in each half.
inline constexpr size_t kPlainSlotBytes = 1024;
inline constexpr size_t kBucketSlotBytes = 4096;

// The number of elements that a block sends per slot.
uint64_t chunk_elems(const KernelCall& call, const GridShape& shape);
// Lengths around every limit at which a tensor is cut.
std::vector<uint64_t> edge_lengths(const KernelCall& call, const GridShape& shape);

// The expected result of the whole tensor, element by element, as bits of elem_dtype(call): scalars
// of reference.h, added in the order that the kernel promises. For buckets, only with exact
// numbers.
std::vector<uint64_t> expected_bits(const KernelCall& call, int world_size);
// The same for all-reduces, as computed by the CPU's collectives.
std::vector<std::vector<uint64_t>> cpu_bits(const std::vector<KernelCall>& calls, int world_size);
DType elem_dtype(const KernelCall& call);

// The launch of one rank. inputs, outputs: of all ranks.
KernelLaunch launch_of(const KernelCall& call, const cuda::Peers& peers, int rank,
                       const std::vector<std::byte*>& inputs,
                       const std::vector<std::byte*>& outputs);

struct CheckedCall {
  KernelCall call;
  std::vector<uint64_t> expected;
};

// Makes the calls one after another on the same links, and throws the first error.
void call_and_check(HostGrid& grid, const std::vector<CheckedCall>& calls);
// Checks against expected_bits().
void call_and_check(HostGrid& grid, const std::vector<KernelCall>& calls);

std::string to_string(const cuda::Failure& failure);

}  // namespace rota::test
