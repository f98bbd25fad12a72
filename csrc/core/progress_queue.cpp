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
#include "core/call_scope.h"
#include "core/progress_pool.h"

namespace rota {

struct ProgressQueue::State {
  explicit State(Placement placement) : placement(placement) {}

  const Placement placement;
  std::mutex mutex;
  std::deque<std::function<void()>> tasks;
  ProgressThread* thread = nullptr;  // borrowed; not null while a task is queued or in its turn
  int num_left = 0;                  // borrowed threads that have left the queue
  ForkSafe<std::condition_variable> has_given_back;
  bool is_closing = false;
  std::atomic<int64_t> num_pending{0};

  // Call it with the mutex held and no thread borrowed; start() the result without it.
  ProgressThread& borrow() {
    thread = &per_process<ProgressPool>().borrow();
    if (placement == Placement::kAnyCore) thread->unbind();
    return *thread;
  }
};

// What a borrowed thread does between start() and its return to the pool.
struct ProgressQueue::Turn {
  std::shared_ptr<State> state;
  ProgressThread& thread;
  bool has_left = false;

  static thread_local Turn* own;
};

thread_local ProgressQueue::Turn* ProgressQueue::Turn::own = nullptr;

ProgressQueue::ProgressQueue(Placement placement)
    : state_(std::make_shared<State>(placement)), fork_generation_(fork_generation()) {}

bool ProgressQueue::is_idle() const {
  return state_->num_pending.load(std::memory_order_acquire) == 0 ||
         fork_generation_ != fork_generation();
}

void ProgressQueue::end(bool awaits_left) {
  if (fork_generation_ != fork_generation()) return;
  std::unique_lock lock(state_->mutex);
  state_->is_closing = true;
  const Turn* own = Turn::own;
  if (own != nullptr && !own->has_left && own->state == state_) return;
  if (own != nullptr || CallScope::is_in_any()) awaits_left = false;
  state_->has_given_back->wait(
      lock, [&] { return state_->thread == nullptr && (!awaits_left || state_->num_left == 0); });
}

void ProgressQueue::enqueue(std::function<void()>&& task) {
  ProgressThread* borrowed = nullptr;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_closing) {
      throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
    }
    if (state_->thread == nullptr) borrowed = &state_->borrow();
    if (state_->placement == Placement::kCoreOfCaller) state_->thread->bind_to_core_of_caller();
    state_->num_pending.fetch_add(1, std::memory_order_relaxed);
    state_->tasks.push_back(std::move(task));
  }
  if (borrowed != nullptr) start(state_, *borrowed);
}

// Outside the lock, because run() takes it first. No other thread starts it: one that queues work
// meanwhile finds that there is a thread, and only its own turn gives it back.
void ProgressQueue::start(std::shared_ptr<State> state, ProgressThread& thread) {
  thread.start([state = std::move(state), &thread] {
    Turn turn{.state = state, .thread = thread};
    run(turn);
  });
}

void ProgressQueue::leave() {
  Turn* own = Turn::own;
  if (own == nullptr || own->has_left) return;
  State& state = *own->state;
  ProgressThread* next = nullptr;
  {
    const std::lock_guard lock(state.mutex);
    if (!state.tasks.empty()) {
      try {
        next = &state.borrow();
      } catch (const Error&) {
        return;
      }
      if (state.placement == Placement::kCoreOfCaller) next->bind_to_core_of_caller();
    }
    state.thread = next;
    ++state.num_left;
    state.num_pending.fetch_sub(1, std::memory_order_release);
    own->has_left = true;
  }
  if (next != nullptr) return start(own->state, *next);
  state.has_given_back->notify_all();
}

void ProgressQueue::run(Turn& turn) {
  State& state = *turn.state;
  Turn::own = &turn;
  std::unique_lock lock(state.mutex);
  while (!turn.has_left && !state.tasks.empty()) {
    {
      const std::function<void()> task = std::move(state.tasks.front());
      state.tasks.pop_front();
      lock.unlock();
      task();
    }  // releases the task's captures before it counts as done
    if (!turn.has_left) state.num_pending.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
  Turn::own = nullptr;
  // Under the lock, and before others see the queue without a thread: whoever then queues work
  // finds this thread in the pool, and close() returns only when the thread no longer touches the
  // queue's tasks.
  per_process<ProgressPool>().give_back(turn.thread);
  if (turn.has_left) {
    --state.num_left;
  } else {
    state.thread = nullptr;
  }
  lock.unlock();
  state.has_given_back->notify_all();
}

}  // namespace rota
