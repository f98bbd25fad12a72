#include "core/progress_queue.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/error.h"
#include "base/fork_generation.h"

namespace rota {

struct ProgressQueue::State {
  std::mutex mutex;
  std::condition_variable has_work;
  std::deque<std::function<void()>> tasks;
  std::atomic<int64_t> num_pending{0};
  std::atomic<std::thread::id> thread_id{};
  bool is_closing = false;
};

ProgressQueue::ProgressQueue(Placement placement)
    : placement_(placement),
      state_(std::make_shared<State>()),
      fork_generation_(fork_generation()) {}

bool ProgressQueue::is_idle() const {
  return state_->num_pending.load(std::memory_order_acquire) == 0 ||
         state_->thread_id.load(std::memory_order_relaxed) == std::this_thread::get_id() ||
         fork_generation_ != fork_generation();
}

void ProgressQueue::close() {
  if (fork_generation_ != fork_generation()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_closing = true;
    thread.swap(thread_);
  }
  if (!thread.joinable()) return;
  state_->has_work.notify_one();
  if (thread.get_id() == std::this_thread::get_id()) return thread.detach();
  thread.join();
}

void ProgressQueue::enqueue(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_closing) {
      throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
    }
    state_->num_pending.fetch_add(1, std::memory_order_relaxed);
    state_->tasks.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread(run, state_);
    if (placement_ == Placement::kCoreOfCaller) move_to_core_of_caller();
  }
  state_->has_work.notify_one();
}

// Only a hint: where it fails, the thread stays where it is.
void ProgressQueue::move_to_core_of_caller() {
  const int core = sched_getcpu();
  if (core == core_ || core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (pthread_setaffinity_np(thread_.native_handle(), sizeof(cores), &cores) == 0) core_ = core;
}

void ProgressQueue::run(const std::shared_ptr<State>& state) {
  state->thread_id.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::unique_lock lock(state->mutex);
  while (true) {
    state->has_work.wait(lock, [&] { return state->is_closing || !state->tasks.empty(); });
    if (state->tasks.empty()) return;
    {
      const std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
    }  // what the task holds is released before it counts as done
    state->num_pending.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
}

}  // namespace rota
