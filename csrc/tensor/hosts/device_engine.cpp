#include "tensor/hosts/device_engine.h"

#include <exception>
#include <string>
#include <utility>

namespace rota::tensors {

// A kernel of the engine that waits for a lost rank would wait for the engine's own timeout.
DeviceEngine::DeviceEngine(hosts::Bridge& bridge, BackendPtr backend)
    : bridge_(bridge), backend_(std::move(backend)) {
  bridge_.on_failure([this] {
    try {
      backend_->abort();
    } catch (const std::exception&) {  // its own timeout ends its waits
    }
  });
}

DeviceEngine::~DeviceEngine() { bridge_.on_failure(nullptr); }

DeviceEngine::Exchange DeviceEngine::start(std::string_view call, const at::Tensor& outgoing,
                                           Splits to, const at::Tensor& incoming, Splits from) {
  Exchange exchange{.work = nullptr, .outgoing = outgoing, .incoming = incoming};
  try {
    exchange.work = backend_->alltoall_base(exchange.incoming, exchange.outgoing, from, to);
  } catch (const std::exception& failure) {
    fail(call, failure.what());
  }
  return exchange;
}

void DeviceEngine::finish(std::string_view call, Exchange& exchange) {
  const Exchange done = std::exchange(exchange, {});
  if (!done.work) return;
  try {
    if (done.work->wait()) return;
  } catch (const std::exception& failure) {
    fail(call, failure.what());
  }
  fail(call, "its work did not end in time");
}

// The cause of the group's failure, if it is known: the engine saw only a consequence.
void DeviceEngine::fail(std::string_view call, const std::string& what) const {
  bridge_.check_usable(call);
  throw Error(ErrorKind::kPeerFailed, bridge_.prefix(call),
              join("the engine of rank ", bridge_.rank(), " failed to exchange CUDA tensors (",
                   what.substr(0, what.find('\n')), "); restart the job"));
}

}  // namespace rota::tensors
