#include "c10d/window.h"

#if defined(C10D_BACKEND_HAS_WINDOW)

#include "c10d/options.h"
#include "tensor/errors.h"
#include "tensor/signals.h"
#include "tensor/thread_state.h"

namespace rota::c10d_backend {

using namespace tensors;  // NOLINT: the layer below, whose calls these are

namespace {

constexpr auto kOpType = ::c10d::OpType::UNKNOWN;  // torch has none for windows

}  // namespace

void WindowRota::tensor_register(const at::Tensor& tensor, bool) {
  if (window_) {
    throw Error(
        ErrorKind::kValue,
        "rota.Window.tensor_register: this window has a tensor; call tensor_deregister first");
  }
  window_ = make_(tensor);
}

void WindowRota::tensor_deregister() {
  registered("tensor_deregister").close();
  window_ = nullptr;
}

c10::intrusive_ptr<::c10d::Work> WindowRota::put(const at::Tensor& tensor, int64_t rank,
                                                 int64_t offset, bool, const ::c10d::PutOptions&) {
  TensorWindow& window = registered("put");
  window.put(tensor, static_cast<int>(rank), offset);
  return HostWork::completed(window.rank(), kOpType, {tensor});
}

at::Tensor WindowRota::map_remote_tensor(int64_t rank) {
  return registered("map_remote_tensor").view(static_cast<int>(rank));
}

c10::intrusive_ptr<::c10d::Work> WindowRota::signal(int64_t rank, bool,
                                                    const ::c10d::SignalOptions&) {
  TensorWindow& window = registered("signal");
  window.signal(static_cast<int>(rank), /*channel=*/0);
  return HostWork::completed(window.rank(), kOpType, {});
}

c10::intrusive_ptr<::c10d::Work> WindowRota::wait_signal(int64_t rank, bool async_op,
                                                         const ::c10d::WaitSignalOptions& opts) {
  TensorWindow& window = registered("wait_signal");
  const auto source = static_cast<int>(rank);
  const auto timeout = own_timeout(opts.timeout);
  if (!async_op) {
    window.wait_signal(source, /*channel=*/0, timeout);
    return HostWork::completed(window.rank(), kOpType, {});
  }
  auto work = c10::make_intrusive<HostWork>(window.rank(), kOpType, "rota:wait_signal",
                                            std::vector<at::Tensor>{}, check_python_signals);
  std::thread([kept = window_, source, timeout, work] {
    keep_thread_state();
    try {
      with_python_errors([&] { kept->wait_signal(source, /*channel=*/0, timeout); });
      work->complete(nullptr);
    } catch (...) {
      work->complete(std::current_exception());
    }
  }).detach();
  return work;
}

TensorWindow& WindowRota::registered(const char* call) const {
  if (window_) return *window_;
  throw Error(ErrorKind::kValue,
              join("rota.Window.", call, ": no tensor is registered; call tensor_register first"));
}

}  // namespace rota::c10d_backend

#endif
