// Connections over a torch process group that can send and recv (Gloo, by default). The only place
// that knows it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

#include "hosts/connections.h"

namespace rota::tensors {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;

class TorchConnections final : public hosts::Connections {
 public:
  explicit TorchConnections(BackendPtr backend) : backend_(std::move(backend)) {}

  MessageRef send(const void* data, size_t num_bytes, int peer, int tag) override;
  MessageRef recv(void* data, size_t num_bytes, int peer, int tag) override;
  MessageRef recv_from_any(void* data, size_t num_bytes, int tag) override;

 private:
  BackendPtr backend_;
};

}  // namespace rota::tensors
