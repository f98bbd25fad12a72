// The progress thread's queue: order, idleness, and an end that loses nothing.
#include "core/progress_queue.h"

#include <atomic>
#include <memory>
#include <thread>

#include "base/cores.h"
#include "check.h"
#include "ranks.h"

namespace rota::test {
namespace {

void tasks_run_in_order() {
  std::vector<int> order;
  ProgressQueue queue;
  for (int i = 0; i < 1000; ++i) {
    queue.enqueue([&order, i] { order.push_back(i); });
  }
  queue.close();
  check_equal(order.size(), size_t{1000}, "tasks run");
  for (int i = 0; i < 1000; ++i) check_equal(order[static_cast<size_t>(i)], i, "task");
}

// Whoever finds the queue idle sees what its tasks did, without any other synchronisation.
void idle_queue_has_done_its_tasks() {
  ProgressQueue queue;
  check(queue.is_idle(), "a new queue is idle");
  int64_t sum = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    queue.enqueue([&sum, i] { sum += i; });
    if (i % 3 == 0) {
      while (!queue.is_idle()) std::this_thread::yield();
      check_equal(sum, i * (i + 1) / 2, "the sum in an idle queue");
    }
  }
}

void running_task_is_not_idle() {
  ProgressQueue queue;
  std::atomic<bool> may_end{false};
  queue.enqueue([&] { may_end.wait(false); });
  check(!queue.is_idle(), "a queue with a task that runs is not idle");
  may_end = true;
  may_end.notify_all();
  queue.close();
  check(queue.is_idle(), "a closed queue is idle");
  queue.close();
}

void thread_shares_the_core_of_its_caller() {
  const int num_cores_of_caller = num_usable_cores();
  ProgressQueue queue(ProgressQueue::Placement::kCoreOfCaller);
  for (int i = 0; i < 100; ++i) {
    int num_cores = 0;
    queue.enqueue([&] { num_cores = num_usable_cores(); });
    while (!queue.is_idle()) std::this_thread::yield();
    check_equal(num_cores, 1, "cores that the task may run on");
  }
  check_equal(num_usable_cores(), num_cores_of_caller, "cores that the caller may run on");
}

void close_runs_what_is_queued() {
  for (int i = 0; i < 200; ++i) {
    std::atomic<int> num_run{0};
    {
      ProgressQueue queue;
      for (int task = 0; task < i % 5; ++task) queue.enqueue([&] { ++num_run; });
    }
    check_equal(num_run.load(), i % 5, "tasks run by the destructor");
  }
}

// A caller who finds the queue idle may free what a task held.
void task_releases_what_it_holds_before_idle() {
  ProgressQueue queue;
  for (int i = 0; i < 500; ++i) {
    auto held = std::make_shared<int>(i);
    std::weak_ptr<int> watch = held;
    queue.enqueue([held = std::move(held)] {});
    while (!queue.is_idle()) std::this_thread::yield();
    check(watch.expired(), "a task that is done holds nothing");
  }
}

void several_threads_enqueue() {
  constexpr int kNumThreads = 4, kNumTasks = 500;
  ProgressQueue queue;
  std::vector<int> last_of_thread(kNumThreads, -1);
  run_threads(kNumThreads, [&](int thread) {
    for (int i = 0; i < kNumTasks; ++i) {
      queue.enqueue([&last_of_thread, thread, i] {
        int& last = last_of_thread[static_cast<size_t>(thread)];
        if (last == i - 1) last = i;
      });
    }
  });
  queue.close();
  for (const int last : last_of_thread) check_equal(last, kNumTasks - 1, "last task in order");
}

// Blocking and queued collectives of one communicator, as tensor/ mixes them.
void collectives_through_the_queue() {
  run_ranks(2, [](Communicator& communicator) {
    ProgressQueue queue;
    int num_failed = 0;
    for (int i = 0; i < 300; ++i) {
      if (queue.is_idle() && i % 3 == 0) communicator.barrier(CallerThread::kUser);
      if (i % 3 != 0) {
        queue.enqueue([&] {
          try {
            communicator.barrier(CallerThread::kProgress);
          } catch (const Error&) {
            ++num_failed;
          }
        });
      }
      if (i % 3 == 2) {
        while (!queue.is_idle()) std::this_thread::yield();
      }
    }
    queue.close();
    check_equal(num_failed, 0, "failed barriers");
  });
}

const CaseTable kCases{
    {"progress_queue_order", tasks_run_in_order},
    {"progress_queue_idle", idle_queue_has_done_its_tasks},
    {"progress_queue_running", running_task_is_not_idle},
    {"progress_queue_placement", thread_shares_the_core_of_its_caller},
    {"progress_queue_close", close_runs_what_is_queued},
    {"progress_queue_releases", task_releases_what_it_holds_before_idle},
    {"progress_queue_threads", several_threads_enqueue},
    {"progress_queue_collectives-ws2", collectives_through_the_queue},
};

}  // namespace
}  // namespace rota::test
