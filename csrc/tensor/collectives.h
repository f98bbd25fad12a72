// The collectives of one rank's tensors, whatever they are on: implemented by the CPU
// (cpu_collectives.h), by kernels of this project (cuda/cuda_collectives.h), and by staging through
// the host's memory (staging_collectives.h). TensorCommunicator picks one by the tensors' device.
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
  kBlocking,  // on the CPU it returns when done, on a GPU when queued on the current stream; no
              // work
  kAsync,     // returns at once; the tensors must not be touched before the work is done
};

// One rank's tensors of one gradient bucket.
struct BucketTensors {
  at::Tensor bucket;
  at::Tensor stats;  // float64[2]: becomes the number of non-finite elements, the sum of squares
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

  // What the tensors are on.
  virtual at::Device device() const = 0;
  // How the ranks reach each other's tensors.
  virtual std::string peer_access() const = 0;

  // Each checks its tensors before anything moves, and throws Error. Of several tensors each is one
  // collective, in order; the work covers them all. Strided tensors are packed, and unpacked
  // afterwards.
  virtual WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                             Launch mode) = 0;
  virtual WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                Launch mode) = 0;
  virtual WorkRef broadcast(at::TensorList tensors, int root, Launch mode) = 0;
  virtual WorkRef all_gather(std::vector<AllGatherTensors> gathers, Launch mode) = 0;
  // Else the next throws. Throws Error(kType) for a dtype that is never reduced.
  virtual bool has_reduce_scatter(at::ScalarType dtype) const = 0;
  // input: world_size parts as long as output; rank i gets the sum of all parts i.
  virtual WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                 Launch mode) = 0;
  virtual bool has_transfers() const = 0;  // else these two throw
  // Matched by source and tag in the order of the calls; peer: kAnyRank receives from any rank. The
  // work of a recv, which may come from a blocking call too, knows the other rank.
  virtual WorkRef send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) = 0;
  virtual WorkRef recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) = 0;

  // Blocks until what was queued is done; check_interrupt runs meanwhile and may throw.
  virtual void finish(const std::function<void()>& check_interrupt) = 0;
};

}  // namespace rota::tensors
