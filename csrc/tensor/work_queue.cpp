#include "tensor/work_queue.h"

#include "core/call_scope.h"
#include "tensor/errors.h"
#include "tensor/operation.h"

namespace rota::tensors {

// The scopes cover whatever runs Python: what the body waits for and what is released.
c10::intrusive_ptr<HostWork> WorkQueue::enqueue(CollectiveKind kind,
                                                std::vector<at::Tensor> results,
                                                std::function<void()> body) {
  auto work = c10::make_intrusive<HostWork>(rank_, op_type_of(kind), row_of(kind).title.data(),
                                            std::move(results), check_interrupt_, communicator_);
  ++*num_unfinished_;
  queue_.enqueue([kind, work, body = std::move(body), communicator = communicator_,
                  num_unfinished = num_unfinished_]() mutable {
    std::exception_ptr exception;
    {
      const CallScope scope(communicator, name(kind));
      try {
        with_python_errors(body);
      } catch (...) {
        exception = std::current_exception();
      }
      body = nullptr;
    }
    --*num_unfinished;
    work->complete(exception);
    const CallScope scope(communicator, name(kind));
    work.reset();
  });
  return work;
}

void WorkQueue::finish(const std::function<void()>& check_interrupt) {
  if (queue_.is_idle()) return;
  // Runs after everything that is queued.
  const auto last = c10::make_intrusive<HostWork>(rank_, ::c10d::OpType::UNKNOWN, nullptr,
                                                  std::vector<at::Tensor>(), check_interrupt);
  queue_.enqueue([last] { last->complete(nullptr); });
  last->await_end();
}

}  // namespace rota::tensors
