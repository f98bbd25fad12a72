// What carries CUDA tensors between hosts: a torch process group of all ranks that offers
// alltoall_base for them (NCCL). The only place that knows it. An alltoall, because the engine then
// starts all sends and receives of a rank together: of single ones two ranks could each wait for
// the other to receive first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "hosts/bridge.h"
#include "tensor/hosts/torch_connections.h"

namespace rota::tensors {

class DeviceEngine {
 public:
  // One that has been started. Holds its tensors until it is finished.
  struct Exchange {
    c10::intrusive_ptr<::c10d::Work> work;  // null: finished
    at::Tensor outgoing;
    at::Tensor incoming;
  };
  // Bytes for each rank or from each, by rank.
  using Splits = std::vector<int64_t>;

  // bridge: of the same ranks; outlives this.
  DeviceEngine(hosts::Bridge& bridge, BackendPtr backend);
  ~DeviceEngine();
  DeviceEngine(const DeviceEngine&) = delete;
  DeviceEngine& operator=(const DeviceEngine&) = delete;

  Splits no_splits() const { return Splits(static_cast<size_t>(bridge_.world_size())); }
  // Starts it on the current stream; every rank calls it. outgoing, incoming: uint8, the parts in
  // ascending rank with nothing between them. call: for errors. Throws Error(kPeerFailed), or what
  // the group has failed of.
  Exchange start(std::string_view call, const at::Tensor& outgoing, Splits to,
                 const at::Tensor& incoming, Splits from);
  // Orders the current stream after it; blocks if the engine does (NCCL does not). Throws likewise.
  void finish(std::string_view call, Exchange& exchange);
  // Both, for the engine's first exchange, in which NCCL makes its communicator: until it has one,
  // abort() does not end its wait for a rank that never comes. So the wait is a thread's, which
  // this leaves behind when the group has failed or its timeout is over.
  void run_first(std::string_view call, const at::Tensor& outgoing, Splits to,
                 const at::Tensor& incoming, Splits from);

 private:
  // wait: whether the engine's work has ended well. Throws as finish().
  template <typename Wait>
  void expect(std::string_view call, const Wait& wait) const;
  [[noreturn]] void fail(std::string_view call, const std::string& what) const;

  hosts::Bridge& bridge_;
  BackendPtr backend_;
};

}  // namespace rota::tensors
