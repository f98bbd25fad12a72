// The collectives of CUDA tensors, as TensorCommunicator asks for them: on kernels of this project
// (tensor/cuda/), or through the memory of the hosts where the GPUs cannot reach each other's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "tensor/tensor_collectives.h"
#include "tensor/work.h"

namespace rota::tensors {

enum class Launch {
  kBlocking,  // on the CPU it returns when done, on a GPU when queued on the current stream; no
              // work
  kAsync,     // returns at once; the tensors must not be touched before the work is done
};

class DeviceCollectives {
 public:
  virtual ~DeviceCollectives() = default;

  virtual at::Device device() const = 0;
  // How the ranks' GPUs reach each other.
  virtual std::string means() const = 0;

  // Arguments have been checked, all but what depends on the device. Each throws Error.
  virtual WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                             Launch mode) = 0;
  virtual WorkRef reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                                Launch mode) = 0;
  virtual WorkRef broadcast(at::TensorList tensors, int root, Launch mode) = 0;
  virtual WorkRef all_gather(const std::vector<AllGatherTensors>& gathers, Launch mode) = 0;
  // Else the next throws. Throws Error(kType) for a dtype that is never reduced.
  virtual bool has_reduce_scatter(at::ScalarType dtype) const = 0;
  // input: world_size parts as long as output; rank i gets the sum of all parts i.
  virtual WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                 Launch mode) = 0;
  virtual bool has_transfers() const = 0;  // else these two throw
  virtual WorkRef send(const at::Tensor& tensor, int peer, Launch mode) = 0;
  virtual WorkRef recv(const at::Tensor& tensor, int peer, Launch mode) = 0;

  // Blocks until the GPU has done what was queued; check_interrupt runs meanwhile and may throw.
  virtual void finish(const std::function<void()>& check_interrupt) = 0;
};

// Whether what this thread queues on its current stream of `device` goes into a graph.
bool is_capturing(at::Device device);

// Collective, over `store` too; blocks. Every rank's tensors are to be on the device that it names
// here. through_host does what no kernel of this GPU can be trusted with. Throws Error(kTransport)
// where this build, or this machine, has nothing for it.
std::unique_ptr<DeviceCollectives> connect_devices(std::shared_ptr<Communicator> communicator,
                                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                                   at::Device device, CallerThread thread,
                                                   std::unique_ptr<DeviceCollectives> through_host);

}  // namespace rota::tensors
