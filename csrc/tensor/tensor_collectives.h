// Collectives on tensors, in the thread that calls: strided ones are packed, and unpacked
// afterwards. What could be wrong is checked before, by the check_ functions here and in
// tensor_checks.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/communicator.h"
#include "tensor/options.h"

namespace rota::tensors {

// One rank's tensors of one all-gather.
struct AllGatherTensors {
  std::vector<at::Tensor> outputs;  // by rank, each of the length and dtype of input
  at::Tensor input;
};

// Throw Error(kType) or Error(kValue) for tensors that do not fit together.
void check_bucket(const at::Tensor& bucket, const BucketOptions& options);
void check_gather(const AllGatherTensors& gather, int world_size);

// What is asked of the communicator, whatever the tensor's device; throw Error(kType).
AllReduceRequest request_of(const at::Tensor& tensor, const AllReduceOptions& options);
BucketRequest request_of(const at::Tensor& bucket, const BucketOptions& options);

void run_all_reduce(Communicator& communicator, const at::Tensor& tensor, cpu::AllReduceArgs args,
                    CallerThread thread);
void run_reduce_bucket(Communicator& communicator, const at::Tensor& bucket,
                       const BucketOptions& options, cpu::AllReduceArgs args, CallerThread thread);
void run_broadcast(Communicator& communicator, const at::Tensor& tensor, int root,
                   CallerThread thread);
void run_all_gather(Communicator& communicator, const AllGatherTensors& gather,
                    CallerThread thread);

}  // namespace rota::tensors
