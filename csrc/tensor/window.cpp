#include "tensor/window.h"

#include <ATen/ops/from_blob.h>

#include "base/timeout.h"
#include "core/window_watch.h"
#include "tensor/gil.h"
#include "tensor/heap_tensor.h"
#include "tensor/signals.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

// A tensor without elements, for which torch has no address, gets the empty start of its storage.
std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  void* data = tensor.numel() == 0 ? tensor.storage().mutable_data() : tensor.data_ptr();
  return {static_cast<std::byte*>(data), tensor.nbytes()};
}

void check_for_window(const at::Tensor& tensor) {
  check_tensor(tensor, "Window");
  if (!tensor.is_contiguous()) {
    throw Error(
        ErrorKind::kValue,
        "rota.Window: the tensor is strided, expected a contiguous one, whose elements have "
        "offsets");
  }
  movable_dtype(tensor, "Window");
}

const std::function<void()>& interrupt_check() {
  static const std::function<void()> check = check_python_signals;
  return check;
}

std::optional<Milliseconds> usable(std::optional<Milliseconds> timeout) {
  return timeout ? std::optional(usable_timeout(*timeout)) : std::nullopt;
}

void check_word(const transport::WindowView& view, uint64_t word) {
  if (word < view.num_words) return;
  throw Error(ErrorKind::kValue,
              join("rota: the word is ", word, ", expected 0 to ", view.num_words, " - 1"));
}

}  // namespace

ExposedTensor::ExposedTensor(at::Tensor tensor, uint64_t num_words, bool others_may_write)
    : tensor_(std::move(tensor)),
      memory_(bytes_of(tensor_), num_words,
              others_may_write ? transport::WindowAccess::kWrite : transport::WindowAccess::kRead) {
}

std::shared_ptr<ExposedTensor> ExposedTensor::make(const at::Tensor& tensor, uint64_t num_words,
                                                   bool others_may_write, bool torch_holds_it) {
  check_for_window(tensor);
  move_to_heap(tensor, "Window", /*counts_tensor=*/!torch_holds_it);
  return std::make_shared<ExposedTensor>(tensor.detach(), num_words, others_may_write);
}

uint64_t ExposedTensor::load(uint64_t word) const {
  check_word(view(), word);
  return view().control->word(word).load();
}

void ExposedTensor::publish(uint64_t word, uint64_t value) {
  if (fork_generation_ != fork_generation()) {
    throw Error(ErrorKind::kInternal,
                "rota: this shared memory belongs to the parent process; make your own after fork");
  }
  check_word(view(), word);
  publish_word(view(), word, value);
}

OpenedTensor::OpenedTensor(const std::string& address, std::string who, Milliseconds timeout)
    : who_(std::move(who)) {
  const auto deadline = std::chrono::steady_clock::now() + usable_timeout(timeout);
  opened_ = transport::OpenedWindow::open(address, who_, [&] {
    check_python_signals();
    if (std::chrono::steady_clock::now() < deadline) return;
    throw Error(ErrorKind::kTimeout, join("rota: ", who_, " did not answer within ",
                                          timeout.count(), " ms; is its process stopped?"));
  });
}

bool OpenedTensor::is_open() const {
  return rota::is_open(*opened_->view().control, opened_->process());
}

uint64_t OpenedTensor::load(uint64_t word) const {
  check_word(opened_->view(), word);
  return opened_->view().control->word(word).load();
}

bool OpenedTensor::wait(uint64_t word, uint64_t value, Milliseconds timeout) const {
  check_word(opened_->view(), word);
  return wait_word(*opened_, word, value, usable_timeout(timeout), who_, interrupt_check());
}

at::Tensor OpenedTensor::bytes() {
  const std::span<std::byte> data = opened_->view().data;
  return at::from_blob(
      data.data(), static_cast<int64_t>(data.size()), [kept = opened_](void*) {}, at::kByte);
}

TensorWindow::TensorWindow(std::shared_ptr<ExposedTensor> own, int rank,
                           const std::vector<std::shared_ptr<OpenedTensor>>& others,
                           int num_channels, Milliseconds timeout,
                           std::shared_ptr<hosts::WindowService> service, uint64_t number)
    : rank_(rank),
      dtype_(own->tensor().scalar_type()),
      shape_(own->tensor().sizes().vec()),
      fork_generation_(fork_generation()),
      own_(std::move(own)),
      others_(others) {
  std::vector<RankWindow> ranks;
  for (size_t peer = 0; peer < others.size(); ++peer) {
    if (const auto& other = others[peer]) {
      const auto& opened = other->opened();
      ranks.push_back({.view = opened->view(), .process = {opened, &opened->process()}});
    } else if (service && service->is_remote(static_cast<int>(peer))) {
      std::byte* const nowhere = nullptr;
      ranks.push_back({.view = {.data = {nowhere, own_->view().data.size()}}, .is_remote = true});
    } else {
      ranks.push_back({.view = own_->view()});
    }
  }
  std::shared_ptr<RemoteRanks> remote;
  if (service) {
    remote_ = std::make_shared<hosts::RemoteWindow>(*service, number,
                                                    movable_dtype(own_->tensor(), "Window"));
    // A call keeps the service, which close() may otherwise end under it. What serves does not: it
    // runs in the service's own threads.
    remote = {remote_.get(), [service, kept = remote_](RemoteRanks*) {}};
  }
  window_ = std::make_shared<Window>(
      rank, std::move(ranks), num_channels,
      Window::Options{.timeout = usable_timeout(timeout), .check_interrupt = check_python_signals},
      std::move(remote));
  if (remote_) remote_->open(remote_, *window_);
}

// Without the mutex in a forked child, where the thread that holds it may be missing.
std::shared_ptr<Window> TensorWindow::window() const {
  if (is_of_parent()) {
    throw Error(ErrorKind::kInternal,
                "rota.Window: this window belongs to the parent process; make a new one after "
                "fork");
  }
  const GilFreeLock lock(mutex_);
  if (window_) return window_;
  throw Error(ErrorKind::kInternal, "rota.Window: this window is closed; make a new one");
}

void TensorWindow::check(std::string_view call, const at::Tensor& tensor, int64_t offset) const {
  check_tensor(tensor, call);
  if (tensor.scalar_type() != dtype_) {
    throw Error(ErrorKind::kType,
                join("rota.", call, ": the tensor's dtype is ", c10::toString(tensor.scalar_type()),
                     ", expected the window's, ", c10::toString(dtype_)));
  }
  if (offset < 0) {
    throw Error(ErrorKind::kValue,
                join("rota.", call, ": offset is ", offset, ", expected 0 or more"));
  }
}

Packed TensorWindow::packed_apart(const at::Tensor& tensor, Packed::Content content,
                                  int rank) const {
  Packed packed(tensor, content);
  const GilFreeLock lock(mutex_);
  std::span<std::byte> data;
  if (rank == rank_ && own_) {
    data = own_->view().data;
  } else if (rank >= 0 && rank < world_size() && others_[static_cast<size_t>(rank)]) {
    data = others_[static_cast<size_t>(rank)]->opened()->view().data;
  }
  if (overlap(range_of(packed.tensor()), {data.data(), data.data() + data.size()})) {
    packed.set_aside();
  }
  return packed;
}

void TensorWindow::put(const at::Tensor& tensor, int rank, int64_t offset) {
  check("Window.put", tensor, offset);
  const Packed packed = packed_apart(tensor, Packed::Content::kRead, rank);
  window()->put(rank, static_cast<uint64_t>(offset), packed.data(), num_elems(tensor),
                c10::elementSize(dtype_));
}

void TensorWindow::get(const at::Tensor& tensor, int rank, int64_t offset) {
  check("Window.get", tensor, offset);
  const Packed packed = packed_apart(tensor, Packed::Content::kOverwritten, rank);
  window()->get(rank, static_cast<uint64_t>(offset), packed.data(), num_elems(tensor),
                c10::elementSize(dtype_));
  packed.unpack();
}

void TensorWindow::accumulate(const at::Tensor& tensor, int rank, int64_t offset,
                              const std::optional<WireFormat>& wire) {
  constexpr std::string_view kCall = "Window.accumulate";
  check(kCall, tensor, offset);
  const DType dtype = reducible_dtype(dtype_, kCall, "the window's dtype");
  if (info(dtype).accumulate != dtype) {
    throw Error(ErrorKind::kType,
                join("rota.Window.accumulate: the window is ", name(dtype),
                     ", which would round every sum; make it float32 and pass wire_dtype"));
  }
  if (wire && dtype != DType::kFloat32) {
    throw Error(ErrorKind::kType,
                join("rota.Window.accumulate: wire_dtype is for windows of float32, this one is ",
                     name(dtype)));
  }
  const Packed packed = packed_apart(tensor, Packed::Content::kRead, rank);
  window()->accumulate(rank, static_cast<uint64_t>(offset), packed.data(), dtype, num_elems(tensor),
                       wire);
}

void TensorWindow::wait_signal(int rank, int channel, std::optional<Milliseconds> timeout) {
  window()->wait_signal(rank, channel, usable(timeout));
}

int TensorWindow::wait_any_signal(const std::vector<int>& ranks, int channel,
                                  std::optional<Milliseconds> timeout) {
  return window()->wait_any_signal(ranks, channel, usable(timeout));
}

at::Tensor TensorWindow::view(int rank) {
  std::byte* data = window()->view(rank).data.data();
  const GilFreeLock lock(mutex_);
  if (rank == rank_) return own_ ? own_->tensor() : at::Tensor();
  return at::from_blob(
      data, shape_, [other = others_[static_cast<size_t>(rank)]](void*) {}, dtype_);
}

void TensorWindow::close() {
  // A forked child has a copy, which it can only drop: whoever closes or serves is its parent's.
  if (is_of_parent()) return;
  const GilReleased gil_released;
  const GilFreeLock lock(mutex_);
  if (own_) own_->close();
  if (remote_) remote_->close();
  remote_.reset();
  window_.reset();
  own_.reset();
  for (auto& other : others_) other.reset();
}

}  // namespace rota::tensors
