// The interface of collectives on tensors, with five implementations: the CPU (cpu_collectives.h),
// several hosts (hosts/bridged_collectives.h), CUDA kernels (cuda/cuda_collectives.h), GPUs of
// several hosts (cuda/bridged_cuda_collectives.h), and staging through the host's memory
// (staging_collectives.h). TensorCommunicator picks one by the group's hosts and the tensors'
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"
#include "tensor/operation.h"
#include "tensor/work.h"

namespace rota::tensors {

enum class Launch {
  // Returns no work (but see recv): on the CPU when done, on a GPU when queued on the current
  // stream.
  kBlocking,
  kAsync,  // returns at once; the tensors must not be touched before the work is done
};

using OperationList = at::ArrayRef<Operation>;

inline std::vector<at::Tensor> results_of(OperationList operations) {
  std::vector<at::Tensor> results;
  for (const Operation& operation : operations) {
    results.insert(results.end(), operation.outputs.begin(), operation.outputs.end());
  }
  return results;
}

class Collectives {
 public:
  virtual ~Collectives() = default;

  // The tensors' device.
  virtual at::Device device() const = 0;
  // How the ranks reach each other's tensors.
  virtual std::string peer_access() const = 0;

  // Checks the tensors before anything moves, and throws Error. Several operations of one kind run
  // in order and are covered by one work. Strided tensors are packed and unpacked.
  virtual WorkRef run(OperationList operations, Launch mode) = 0;
  // Whether run() supports an operation. Throws Error for tensors that no device would take.
  virtual bool supports(const Operation&) const { return true; }
  virtual WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                Launch mode) = 0;
  virtual bool has_transfers() const { return true; }  // otherwise transfer() throws
  // Sends to the peer or receives from it. Messages match by source and tag, in call order;
  // kAnyRank receives from any rank. A recv's work, which blocking calls return too, holds the
  // sender's rank.
  virtual WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                           Launch mode) = 0;

  // Blocks until queued work is done. check_interrupt runs meanwhile and may throw.
  virtual void finish(const std::function<void()>& check_interrupt) = 0;
  // The same; throws if any of it has failed where no call has thrown.
  virtual void check_results(const std::function<void()>&) {}
};

}  // namespace rota::tensors
