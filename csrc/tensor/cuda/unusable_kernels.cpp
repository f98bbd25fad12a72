#include "tensor/cuda/unusable_kernels.h"

#include <sstream>

#include "base/error.h"

namespace rota::tensors {
namespace {

using Role = TestedKernel::Role;

}  // namespace

std::string UnusableKernels::describe(size_t number) const {
  return join(tested_kernels()[number].to_string(), ": ", findings_.at(number));
}

template <typename Predicate>
std::optional<std::string> UnusableKernels::find(const Predicate& is_it) const {
  for (const auto& [number, finding] : findings_) {
    if (is_it(tested_kernels()[number])) return describe(number);
  }
  return std::nullopt;
}

std::optional<std::string> UnusableKernels::why_not(cuda::Kernel kernel, const WireFormat& format,
                                                    cuda::Sums sums) const {
  return find([&](const TestedKernel& tested) {
    return tested.role == Role::kCollective && tested.collective == kernel && tested.sums == sums &&
           tested.format == format;
  });
}

std::optional<std::string> UnusableKernels::why_not_bucket(DType gradients,
                                                           const WireFormat& wire) const {
  return find([&](const TestedKernel& tested) {
    return tested.role != Role::kCollective && tested.gradients == gradients &&
           tested.format == wire;
  });
}

std::string UnusableKernels::summary() const {
  if (empty()) return "";
  const std::string first = describe(findings_.begin()->first);
  if (findings_.size() == 1) return first;
  return join(first, "; and ", findings_.size() - 1, " more");
}

// The number of every finding in one line, then the texts of as many as fit.
std::string UnusableKernels::encode(size_t max_bytes) const {
  std::string text;
  for (const auto& [number, finding] : findings_) text += join(number, ' ');
  for (const auto& [number, finding] : findings_) {
    const std::string line = join('\n', finding);
    if (text.size() + line.size() > max_bytes) break;
    text += line;
  }
  return text;
}

void UnusableKernels::merge(const std::string& encoded, int rank) {
  std::istringstream text(encoded);
  std::string numbers;
  std::getline(text, numbers);
  auto all = in_classic_locale<std::istringstream>(numbers);
  for (size_t number; all >> number && number < tested_kernels().size();) {
    std::string finding;
    std::getline(text, finding);
    add(number, join(finding, finding.empty() ? "" : " ", "(on rank ", rank, ")"));
  }
}

}  // namespace rota::tensors
