#include "tensor/work_queue.h"

#include "tensor/errors.h"
#include "tensor/operation.h"

namespace rota::tensors {

WorkRef WorkQueue::enqueue(CollectiveKind kind, std::vector<at::Tensor> results,
                           std::function<void()> body) {
  auto work = c10::make_intrusive<HostWork>(rank_, op_type_of(kind), row_of(kind).title.data(),
                                            std::move(results), check_interrupt_);
  ++*num_unfinished_;
  queue_.enqueue([work, body = std::move(body), num_unfinished = num_unfinished_] {
    std::exception_ptr exception;
    try {
      with_python_errors(body);
    } catch (...) {
      exception = std::current_exception();
    }
    --*num_unfinished;
    work->complete(exception);
  });
  return work;
}

void WorkQueue::finish(const std::function<void()>& check_interrupt) {
  if (queue_.is_idle()) return;
  // Runs after everything that is queued.
  const auto last = c10::make_intrusive<HostWork>(rank_, ::c10d::OpType::UNKNOWN, nullptr,
                                                  std::vector<at::Tensor>(), check_interrupt);
  queue_.enqueue([last] { last->complete(nullptr); });
  last->wait(kNoTimeout);
}

}  // namespace rota::tensors
