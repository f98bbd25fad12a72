// What a GPU's self-test found wrong, and how ranks share it: no rank uses what fails on one of
// them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tensor/cuda/self_test_table.h"

namespace rota::tensors {

class UnusableKernels {
 public:
  // number: in tested_kernels(). The first finding of a kernel stays.
  void add(size_t number, const std::string& finding) { findings_.emplace(number, finding); }

  bool empty() const { return findings_.empty(); }
  // By number.
  const std::map<size_t, std::string>& findings() const { return findings_; }

  // The finding about a kernel ("two_shot of float16: element 17 ..."); none if it can be used.
  std::optional<std::string> why_not(cuda::Kernel kernel, const WireFormat& format,
                                     cuda::Sums sums = cuda::Sums::kInGroups) const;
  // The same for pack and unpack.
  std::optional<std::string> why_not_bucket(DType gradients, const WireFormat& wire) const;

  // The first finding and how many more there are.
  std::string summary() const;

  // Encodes the findings in at most max_bytes; if that is too short, texts are left out, not
  // findings.
  std::string encode(size_t max_bytes) const;
  // Adds another rank's encoded findings.
  void merge(const std::string& encoded, int rank);

 private:
  std::string describe(size_t number) const;
  template <typename Predicate>
  std::optional<std::string> find(const Predicate& is_it) const;

  std::map<size_t, std::string> findings_;
};

}  // namespace rota::tensors
