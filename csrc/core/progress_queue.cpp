#include "core/progress_queue.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fork_generation.h"
#include "base/fork_safe.h"
#include "base/per_process.h"
#include "core/progress_pool.h"

namespace rota {

struct ProgressQueue::State {
  std::mutex mutex;
  std::deque<std::function<void()>> tasks;
  ProgressThread* thread = nullptr;  // borrowed; not null while a task is queued or runs
  ForkSafe<std::condition_variable> has_given_back;
  bool is_closing = false;
  std::atomic<int64_t> num_pending{0};
};

namespace {

// The State whose tasks this thread runs.
thread_local const void* running = nullptr;

}  // namespace

ProgressQueue::ProgressQueue(Placement placement)
    : placement_(placement),
      state_(std::make_shared<State>()),
      fork_generation_(fork_generation()) {}

bool ProgressQueue::is_idle() const {
  return state_->num_pending.load(std::memory_order_acquire) == 0 || running == state_.get() ||
         fork_generation_ != fork_generation();
}

void ProgressQueue::close() {
  if (fork_generation_ != fork_generation()) return;
  std::unique_lock lock(state_->mutex);
  state_->is_closing = true;
  if (running == state_.get()) return;
  state_->has_given_back->wait(lock, [this] { return state_->thread == nullptr; });
}

void ProgressQueue::enqueue(std::function<void()> task) {
  ProgressThread* borrowed = nullptr;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_closing) {
      throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
    }
    if (state_->thread == nullptr) {
      borrowed = state_->thread = &per_process<ProgressPool>().borrow();
      if (placement_ == Placement::kAnyCore) borrowed->unbind();
    }
    if (placement_ == Placement::kCoreOfCaller) state_->thread->bind_to_core_of_caller();
    state_->num_pending.fetch_add(1, std::memory_order_relaxed);
    state_->tasks.push_back(std::move(task));
  }
  // Outside the lock, because run() takes it first. No other thread starts it: one that queues work
  // meanwhile finds that there is a thread, and only run() gives it back.
  if (borrowed != nullptr) borrowed->start([state = state_] { run(*state); });
}

void ProgressQueue::run(State& state) {
  running = &state;
  std::unique_lock lock(state.mutex);
  while (!state.tasks.empty()) {
    {
      const std::function<void()> task = std::move(state.tasks.front());
      state.tasks.pop_front();
      lock.unlock();
      task();
    }  // releases the task's captures before it counts as done
    state.num_pending.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
  running = nullptr;
  // Under the lock, and before others see the queue without a thread: whoever then queues work
  // finds this thread in the pool, and close() returns only when the thread no longer touches the
  // queue's tasks.
  per_process<ProgressPool>().give_back(*std::exchange(state.thread, nullptr));
  lock.unlock();
  state.has_given_back->notify_all();
}

}  // namespace rota
