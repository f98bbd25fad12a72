// The interface of collectives on tensors, with three implementations: the CPU (cpu_collectives.h),
// CUDA kernels (cuda/cuda_collectives.h), and staging through the host's memory
// (staging_collectives.h). TensorCommunicator picks one by the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"
#include "tensor/work.h"

namespace rota::tensors {

enum class Launch {
  // Returns no work (but see recv): on the CPU when done, on a GPU when queued on the current
  // stream.
  kBlocking,
  kAsync,  // returns at once; the tensors must not be touched before the work is done
};

// One rank's tensors of one gradient bucket.
struct BucketTensors {
  at::Tensor bucket;
  at::Tensor stats;  // float64[2], output: number of non-finite elements, sum of squares
  std::optional<at::Tensor> residual;  // float32, as many elements as the bucket
};

// One rank's tensors of one all-gather.
struct AllGatherTensors {
  std::vector<at::Tensor> outputs;  // by rank, each of the length and dtype of input
  at::Tensor input;
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  // The tensors' device.
  virtual at::Device device() const = 0;
  // How the ranks reach each other's tensors.
  virtual std::string peer_access() const = 0;

  // Each checks its tensors before moving anything, and throws Error. Several tensors are several
  // collectives, in order, covered by one work. Strided tensors are packed and unpacked.
  virtual WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                             Launch mode) = 0;
  virtual WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                Launch mode) = 0;
  virtual WorkRef broadcast(at::TensorList tensors, int root, Launch mode) = 0;
  virtual WorkRef all_gather(std::vector<AllGatherTensors> gathers, Launch mode) = 0;
  // Whether reduce_scatter() supports the dtype. Throws Error(kType) for one that cannot be
  // reduced.
  virtual bool has_reduce_scatter(at::ScalarType dtype) const = 0;
  // input: world_size parts as long as output; rank i gets the sum of all parts i.
  virtual WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                 Launch mode) = 0;
  virtual bool has_transfers() const = 0;  // otherwise send() and recv() throw
  // Messages match by source and tag, in call order; kAnyRank receives from any rank. A recv's
  // work, which blocking calls return too, holds the sender's rank.
  virtual WorkRef send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) = 0;
  virtual WorkRef recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) = 0;

  // Blocks until queued work is done. check_interrupt runs meanwhile and may throw.
  virtual void finish(const std::function<void()>& check_interrupt) = 0;
};

}  // namespace rota::tensors
