#include "tensor/cuda/self_test_table.h"

#include "base/error.h"
#include "cuda/executor.h"

namespace rota::tensors {
namespace {

using Role = TestedKernel::Role;

enum class Formats : uint8_t { kAll, kPlain, kBytes };

// As the kernels' .cu files have it.
Formats formats_of(cuda::Kernel kernel) {
  switch (kernel) {
    case cuda::Kernel::kOneShot:
    case cuda::Kernel::kTwoShot:
    case cuda::Kernel::kTwoShotInPlace:
    case cuda::Kernel::kOrderedRing:
    case cuda::Kernel::kRing:
    case cuda::Kernel::kHierarchical:
      return Formats::kAll;
    case cuda::Kernel::kLowLatency:
    case cuda::Kernel::kReduceScatter:
      return Formats::kPlain;
    case cuda::Kernel::kAllGather:
    case cuda::Kernel::kBroadcast:
    case cuda::Kernel::kTransfer:
      return Formats::kBytes;
  }
  return Formats::kBytes;
}

// body(format) for each format that sums, or buckets, come in.
template <typename Body>
void for_each_format(bool (*is_covered)(DType), const Body& body) {
  for (size_t i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (!is_covered(dtype)) continue;
    body(WireFormat{dtype});
    if (has_block_scaling(dtype)) body(WireFormat{dtype, true});
  }
}

void add_collectives(std::vector<TestedKernel>& all) {
  for (size_t i = 0; i < cuda::kKernelNames.size(); ++i) {
    TestedKernel tested{.role = Role::kCollective,
                        .collective = static_cast<cuda::Kernel>(i),
                        .gradients = DType::kFloat32,
                        .format = cuda::kBytes};
    const Formats formats = formats_of(tested.collective);
    if (formats == Formats::kBytes) {
      all.push_back(tested);
      continue;
    }
    for_each_format([](DType dtype) { return info(dtype).is_reducible; },
                    [&](const WireFormat& format) {
                      if (format.is_block_scaled && formats == Formats::kPlain) return;
                      tested.format = format;
                      all.push_back(tested);
                    });
  }
}

void add_bucket_kernels(std::vector<TestedKernel>& all, Role role) {
  for (size_t i = 0; i < kNumDTypes; ++i) {
    const auto gradients = static_cast<DType>(i);
    if (!is_bucket_dtype(gradients)) continue;
    for_each_format([](DType dtype) { return is_wire_dtype(dtype); },
                    [&](const WireFormat& format) {
                      all.push_back({.role = role,
                                     .collective = cuda::Kernel::kOneShot,
                                     .gradients = gradients,
                                     .format = format});
                    });
  }
}

}  // namespace

std::string_view TestedKernel::kernel() const {
  switch (role) {
    case Role::kCollective:
      return name(collective);
    case Role::kPack:
      return "pack";
    case Role::kUnpack:
      return "unpack";
  }
  return "";
}

std::string TestedKernel::to_string() const {
  const std::string wire = join(format.is_block_scaled ? "scaled " : "", name(format.dtype));
  if (role == Role::kCollective) return join(kernel(), " of ", wire);
  return join(kernel(), " of ", name(gradients), role == Role::kPack ? " as " : " from ", wire);
}

const std::vector<TestedKernel>& tested_kernels() {
  static const std::vector<TestedKernel> all = [] {
    std::vector<TestedKernel> list;
    add_collectives(list);
    add_bucket_kernels(list, Role::kPack);
    add_bucket_kernels(list, Role::kUnpack);
    return list;
  }();
  return all;
}

}  // namespace rota::tensors
