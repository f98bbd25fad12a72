#include "tensor/hosts/device_engine.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <future>

#include "tensor/thread_state.h"

namespace rota::tensors {
namespace {

// More than it takes to notice that a rank of another host is lost (hosts/silence.h).
constexpr auto kPatienceWithNews = std::chrono::seconds(2);
// From one look at whether the group has failed to the next, in the first exchange.
constexpr auto kFirstPoll = std::chrono::milliseconds(2);

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
  expect(call, [&] { return done.work->wait(); });
}

void DeviceEngine::run_first(std::string_view call, const at::Tensor& outgoing, Splits to,
                             const at::Tensor& incoming, Splits from) {
  const at::Device device = outgoing.device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  // Whatever the thread uses is its own.
  std::packaged_task<bool()> exchange([backend = backend_, stream, sent = outgoing,
                                       to = std::move(to), received = incoming,
                                       from = std::move(from)]() mutable {
    keep_thread_state();
    const c10::StreamGuard on_stream(stream);
    return backend->alltoall_base(received, sent, from, to)->wait();
  });
  std::future<bool> result = exchange.get_future();
  std::thread(std::move(exchange)).detach();
  const auto end = std::chrono::steady_clock::now() + bridge_.timeout();
  while (result.wait_for(kFirstPoll) != std::future_status::ready) {
    bridge_.check_usable(call);
    if (std::chrono::steady_clock::now() < end) continue;
    fail(call, join("its first exchange took more than ", bridge_.timeout().count(), " ms"));
  }
  expect(call, [&] { return result.get(); });
}

template <typename Wait>
void DeviceEngine::expect(std::string_view call, const Wait& wait) const {
  try {
    if (wait()) return;
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
