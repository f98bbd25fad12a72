#include "core/progress_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace rota {
namespace {

std::atomic<void (*)()> runs_first = nullptr;

}  // namespace

void ProgressThread::run_first(void (*function)()) { runs_first = function; }

void ProgressThread::start(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
  }
  has_job_.notify_one();
}

void ProgressThread::run() {
  if (const auto function = runs_first.load()) function();
  while (true) {
    std::function<void()> job;
    {
      std::unique_lock lock(mutex_);
      has_job_.wait(lock, [this] { return job_ != nullptr; });
      job = std::exchange(job_, nullptr);
    }
    job();
  }
}

void ProgressThread::bind_to_core_of_caller() {
  const int core = sched_getcpu();
  if (core == core_ || core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (pthread_setaffinity_np(thread_.native_handle(), sizeof(cores), &cores) == 0) core_ = core;
}

void ProgressThread::unbind() {
  cpu_set_t cores;
  if (core_ < 0 || sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  if (pthread_setaffinity_np(thread_.native_handle(), sizeof(cores), &cores) == 0) core_ = -1;
}

ProgressThread& ProgressPool::borrow() {
  const std::lock_guard lock(mutex_);
  if (!idle_.empty()) {
    ProgressThread& thread = *idle_.back();
    idle_.pop_back();
    return thread;
  }
  try {
    return *threads_.emplace_back(std::make_unique<ProgressThread>());
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kTransport,
                join("rota: cannot start a progress thread beside ", threads_.size(), " (",
                     error.what(), "); raise `ulimit -u` or the container's limit of processes"));
  }
}

void ProgressPool::give_back(ProgressThread& thread) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(&thread);
  has_given_back_.notify_all();
}

void ProgressPool::await_all() {
  std::unique_lock lock(mutex_);
  has_given_back_.wait(lock, [this] { return idle_.size() == threads_.size(); });
}

}  // namespace rota
