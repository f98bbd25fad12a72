#include "tensor/hosts/device_engine.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace rota::tensors {
namespace {

// More than it takes to notice that a rank of another host is lost (hosts/silence.h).
constexpr auto kPatienceWithNews = std::chrono::seconds(2);

}  // namespace

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

// With the cause, if there is one: where a rank is lost, the engine sees a connection break before
// the group knows which.
void DeviceEngine::fail(std::string_view call, const std::string& what) const {
  bridge_.await_failure(kPatienceWithNews);
  bridge_.check_usable(call);
  throw Error(ErrorKind::kPeerFailed, bridge_.prefix(call),
              join("the engine of rank ", bridge_.rank(), " failed to exchange CUDA tensors (",
                   what.substr(0, what.find('\n')), "); restart the job"));
}

}  // namespace rota::tensors
