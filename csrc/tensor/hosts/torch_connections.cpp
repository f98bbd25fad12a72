#include "tensor/hosts/torch_connections.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace rota::tensors {
namespace {

// "Connection reset by peer" of Gloo's "[file:line] Read error [address]: Connection reset by peer.
// This is typically caused by ...".
std::string cause_of(const std::exception& failure) {
  const std::string text = failure.what();
  const std::string cause = text.substr(0, text.find(". This is"));
  const size_t begin = cause.rfind("] ");
  return begin == std::string::npos ? cause : cause.substr(begin + 2);
}

template <typename Body>
auto with_cause(const Body& body) {
  try {
    return body();
  } catch (const std::exception& failure) {
    throw std::runtime_error(cause_of(failure));
  }
}

std::vector<at::Tensor> bytes_of(const void* data, size_t num_bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(num_bytes)}, at::kByte)};
}

class TorchMessage final : public hosts::Connections::Message {
 public:
  explicit TorchMessage(c10::intrusive_ptr<::c10d::Work> work) : work_(std::move(work)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    return with_cause([&] { return work_->wait(timeout); });
  }
  void abort() override {
    try {
      work_->abort();
    } catch (const std::exception&) {  // not every backend can
    }
  }
  int source() const override { return work_->sourceRank(); }

 private:
  c10::intrusive_ptr<::c10d::Work> work_;
};

// start(tensors) starts a message of these bytes.
template <typename Start>
hosts::Connections::MessageRef message(const void* data, size_t num_bytes, const Start& start) {
  std::vector<at::Tensor> tensors = bytes_of(data, num_bytes);
  return with_cause([&] { return std::make_shared<TorchMessage>(start(tensors)); });
}

}  // namespace

TorchConnections::MessageRef TorchConnections::send(const void* data, size_t num_bytes, int peer,
                                                    int tag) {
  return message(data, num_bytes,
                 [&](auto& tensors) { return backend_->send(tensors, peer, tag); });
}

TorchConnections::MessageRef TorchConnections::recv(void* data, size_t num_bytes, int peer,
                                                    int tag) {
  return message(data, num_bytes,
                 [&](auto& tensors) { return backend_->recv(tensors, peer, tag); });
}

TorchConnections::MessageRef TorchConnections::recv_from_any(void* data, size_t num_bytes,
                                                             int tag) {
  return message(data, num_bytes,
                 [&](auto& tensors) { return backend_->recvAnysource(tensors, tag); });
}

}  // namespace rota::tensors
