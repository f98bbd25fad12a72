#include "tensor/work.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include "base/timeout.h"
#include "core/call_scope.h"
#include "tensor/errors.h"

namespace rota::tensors {
namespace {

// The longest delay before Ctrl-C is noticed.
constexpr auto kInterruptSlice = std::chrono::milliseconds(50);

// A future of GPU tensors must know their device: waiting for it then waits for the stream.
std::vector<c10::Device> gpus_of(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty() || !tensors[0].is_cuda()) return {};
  return {tensors[0].device()};
}

void settle(const c10::intrusive_ptr<c10::ivalue::Future>& future, const c10::IValue& value,
            const std::exception_ptr& exception) {
  if (exception) {
    future->setError(exception);
  } else {
    future->markCompleted(value);
  }
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  return make_future(c10::ListType::create(c10::TensorType::get()), tensors_);
}

c10::intrusive_ptr<c10::ivalue::Future> Work::hook_future() {
  const c10::TypePtr type = c10::PyObjectType::get();
  return make_future(type, torch::jit::toIValue(pybind11::cast(tensors_.at(0)), type));
}

HostWork::HostWork(int rank, ::c10d::OpType op_type, const char* title,
                   std::vector<at::Tensor> tensors, std::function<void()> check_interrupt,
                   const void* communicator, std::optional<Clock::time_point> called)
    : Work(rank, op_type, title, std::move(tensors)),
      check_interrupt_(std::move(check_interrupt)),
      communicator_(communicator),
      called_(called) {}

c10::intrusive_ptr<Work> HostWork::completed(int rank, ::c10d::OpType op_type,
                                             std::vector<at::Tensor> tensors,
                                             std::optional<Clock::time_point> called) {
  auto work = c10::make_intrusive<HostWork>(rank, op_type, nullptr, std::move(tensors), nullptr,
                                            nullptr, called);
  if (called) work->ended_ = Clock::now();
  work->completed_ = true;  // no other thread has seen it yet
  return work;
}

void HostWork::complete(std::exception_ptr exception, ProgressQueue* callbacks) {
  ended_ = Clock::now();
  finish(exception);
  // Outside the lock: a future's callbacks may call back into this work.
  std::vector<Pending> futures;
  {
    const std::lock_guard lock(mutex_);
    futures.swap(futures_);
  }
  if (futures.empty()) return;
  const auto settle_all = [futures = std::move(futures), exception] {
    for (const Pending& pending : futures) settle(pending.future, pending.value, exception);
  };
  if (callbacks == nullptr) {
    ProgressQueue::leave();
    return settle_all();
  }
  try {
    callbacks->enqueue([settle_all] {
      ProgressQueue::leave();
      settle_all();
    });
  } catch (const Error&) {  // closed meanwhile, or no thread can be had
    settle_all();
  }
}

void HostWork::check_process() const {
  if (fork_generation_ == fork_generation() || completed_) return;
  throw PythonError(Error(ErrorKind::kInternal,
                          "rota: this Work belongs to the parent process, which completes it; wait "
                          "for it there, and make a new communicator after fork"));
}

bool HostWork::isCompleted() {
  check_process();
  return Work::isCompleted();
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  if (!HostWork::isCompleted()) {
    with_python_errors([&] { CallScope::check_not_inside(communicator_, "Work.wait"); });
  }
  const CallScope scope(communicator_, "Work.wait", CallScope::Kind::kWait);
  await_end(timeout);
  return true;
}

void HostWork::await_end(std::chrono::milliseconds own_timeout) {
  const auto timeout = usable_timeout(own_timeout);
  std::unique_lock lock(mutex_);
  // Most works are done, and the clock costs more than the rest.
  const auto start = completed_ ? Clock::time_point() : Clock::now();
  while (!completed_ && !cv_.wait_for(lock, kInterruptSlice, [this] { return completed_; })) {
    lock.unlock();
    check_interrupt_();
    if (timeout != kNoTimeout && Clock::now() - start >= timeout) {
      throw PythonError(
          Error(ErrorKind::kTimeout, join("rota: Work.wait() gave up after ", timeout.count(),
                                          " ms; the collective goes on until its own timeout")));
    }
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
}

float HostWork::getDuration() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(completed_, "rota: Work._get_duration() of a call that is not done; wait for it");
  TORCH_CHECK(called_, "rota: the duration of this call is unknown; call it with async_op=True");
  return std::chrono::duration<float, std::milli>(ended_ - *called_).count();
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::make_future(c10::TypePtr type,
                                                              c10::IValue value) {
  check_process();
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type), gpus_of(tensors_));
  std::exception_ptr exception;
  {
    const std::lock_guard lock(mutex_);
    if (!completed_) {
      futures_.push_back({future, std::move(value)});
      return future;
    }
    exception = exception_;
  }
  settle(future, value, exception);
  return future;
}

}  // namespace rota::tensors
