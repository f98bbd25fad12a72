#include "tensor/cuda/self_test_table.h"

#include "base/error.h"
#include "cuda/launch.h"

namespace rota::tensors {
namespace {

using Role = TestedKernel::Role;

// Calls body(format) for every format.
template <typename Body>
void for_each_format(const Body& body) {
  for (size_t i = 0; i < kNumDTypes; ++i) {
    body(WireFormat{static_cast<DType>(i)});
    body(WireFormat{static_cast<DType>(i), true});
  }
}

void add_collectives(std::vector<TestedKernel>& all) {
  for (size_t i = 0; i < cuda::kKernelNames.size(); ++i) {
    const auto kernel = static_cast<cuda::Kernel>(i);
    for (const cuda::Sums sums : cuda::kAllSums) {
      for_each_format([&](const WireFormat& format) {
        if (!cuda::is_compiled(kernel, format, sums)) return;
        all.push_back({.role = Role::kCollective,
                       .collective = kernel,
                       .sums = sums,
                       .gradients = DType::kFloat32,
                       .format = format});
      });
    }
  }
}

void add_bucket_kernels(std::vector<TestedKernel>& all, Role role) {
  for (size_t i = 0; i < kNumDTypes; ++i) {
    const auto gradients = static_cast<DType>(i);
    for_each_format([&](const WireFormat& format) {
      if (!cuda::is_bucket_compiled(gradients, format)) return;
      all.push_back({.role = role,
                     .collective = cuda::Kernel::kOneShot,
                     .sums = cuda::Sums::kInGroups,
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
  if (role == Role::kCollective) {
    return join(kernel(), " of ", wire, sums == cuda::Sums::kInTree ? " in a tree" : "");
  }
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
