// A communicator's queue: order, idleness, a close that loses no task, and threads that
// communicators share.
#include "core/progress_queue.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <latch>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base/cores.h"
#include "base/per_process.h"
#include "check.h"
#include "core/progress_pool.h"
#include "ranks.h"

namespace rota::test {
namespace {

void wait_until_idle(const ProgressQueue& queue) {
  while (!queue.is_idle()) std::this_thread::yield();
}

// A caller that finds the queue idle sees what its tasks did, without other synchronisation, and
// may free what they held.
void idle_queue_has_done_its_tasks() {
  ProgressQueue queue;
  check(queue.is_idle(), "a new queue is idle");
  int64_t sum = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    auto held = std::make_shared<int64_t>(i);
    const std::weak_ptr<int64_t> watch = held;
    queue.enqueue([&sum, held = std::move(held)] { sum += *held; });
    if (i % 3 != 0) continue;
    wait_until_idle(queue);
    check_equal(sum, i * (i + 1) / 2, "the sum in an idle queue");
    check(watch.expired(), "a task that is done holds nothing");
  }
}

class Threads {
 public:
  void add_this() {
    const std::lock_guard lock(mutex_);
    ids_.insert(std::this_thread::get_id());
  }
  size_t count() {
    const std::lock_guard lock(mutex_);
    return ids_.size();
  }

 private:
  std::mutex mutex_;
  std::set<std::thread::id> ids_;
};

// An empty queue keeps no thread. A queue's thread may still be on its way back to the pool when
// the next queue needs one, so there may be a few.
void idle_queues_keep_no_thread() {
  constexpr size_t kNumQueues = 100;
  Threads threads;
  std::list<ProgressQueue> queues(kNumQueues);
  for (int round = 0; round < 5; ++round) {
    for (ProgressQueue& queue : queues) {
      queue.enqueue([&] { threads.add_this(); });
      wait_until_idle(queue);
    }
  }
  check(threads.count() < kNumQueues / 4, join(threads.count(), " threads are few"));
}

// Tasks of several groups wait for their peers, and the two ranks queue them in different orders.
// Each group gets its own thread, since a shared one would deadlock.
void groups_in_different_orders_do_not_block_each_other() {
  constexpr int kNumGroups = 3;
  for (int round = 0; round < 50; ++round) {
    std::list<std::barrier<>> rendezvous;
    for (int group = 0; group < kNumGroups; ++group) rendezvous.emplace_back(2);
    run_threads(2, [&](int rank) {
      std::list<ProgressQueue> queues(kNumGroups);
      std::vector<std::function<void()>> starts;
      auto meeting = rendezvous.begin();
      for (ProgressQueue& queue : queues) {
        starts.push_back([&queue, &meeting = *meeting] {
          queue.enqueue([&meeting] { meeting.arrive_and_wait(); });
        });
        ++meeting;
      }
      if (rank == 1) std::reverse(starts.begin(), starts.end());
      for (const auto& start : starts) start();
    });
  }
}

void close_does_not_wait_for_other_queues() {
  ProgressQueue other;
  std::latch may_end(1);
  other.enqueue([&] { may_end.wait(); });
  for (int i = 0; i < 100; ++i) {
    int num_run = 0;
    ProgressQueue queue;
    for (int task = 0; task < 3; ++task) queue.enqueue([&] { ++num_run; });
    queue.close();
    check_equal(num_run, 3, "tasks run");
  }
  check(!other.is_idle(), "the other queue's task runs still");
  may_end.count_down();
}

// When close() returns, every task that enqueue() accepted has run, and none runs afterwards.
void nothing_runs_after_close() {
  for (int round = 0; round < 100; ++round) {
    ProgressQueue queue;
    std::atomic<int> num_taken{0}, num_run{0};
    std::atomic<bool> is_closed{false};
    run_threads(3, [&](int thread) {
      if (thread == 0) {
        while (num_taken.load() < round) std::this_thread::yield();
        queue.close();
        is_closed = true;
        return;
      }
      try {
        while (true) {
          queue.enqueue([&] {
            check(!is_closed.load(), "a task runs before close() returns");
            ++num_run;
          });
          ++num_taken;
        }
      } catch (const Error& error) {
        check_contains(error.what(), "closed");
      }
    });
    check_equal(num_run.load(), num_taken.load(), "tasks run");
  }
}

// The queue's thread runs the remaining tasks, and goes back to the pool.
void task_destroys_its_queue() {
  Threads threads;
  for (int i = 0; i < 100; ++i) {
    std::atomic<int> num_run{0};
    std::latch may_start(1);
    auto queue = std::make_shared<ProgressQueue>();
    ProgressQueue& last_chance = *queue;
    queue->enqueue([&, queue]() mutable {
      may_start.wait();
      queue.reset();
      threads.add_this();
      ++num_run;
    });
    for (int task = 0; task < 3; ++task) last_chance.enqueue([&] { ++num_run; });
    queue.reset();
    may_start.count_down();
    while (num_run.load() < 4) std::this_thread::yield();
  }
  check(threads.count() < 25, join(threads.count(), " threads are few"));
}

void thread_leaves_the_core_of_another_queues_caller() {
  Threads threads;
  const auto run_on = [&](ProgressQueue::Placement placement) {
    int num_cores = 0;
    ProgressQueue queue(placement);
    queue.enqueue([&] {
      threads.add_this();
      num_cores = num_usable_cores();
    });
    queue.close();
    return num_cores;
  };
  for (int i = 0; i < 10; ++i) {
    check_equal(run_on(ProgressQueue::Placement::kCoreOfCaller), 1, "cores where none is to spare");
    check_equal(run_on(ProgressQueue::Placement::kAnyCore), num_usable_cores(), "cores otherwise");
  }
  check_equal(threads.count(), 1, "threads");
}

void task_that_has_left_waits_for_a_later_one() {
  for (int round = 0; round < 200; ++round) {
    std::latch has_run(1);
    ProgressQueue queue;
    queue.enqueue([&] {
      ProgressQueue::leave();
      has_run.wait();
    });
    if (round % 2 == 0) wait_until_idle(queue);
    queue.enqueue([&] { has_run.count_down(); });
    queue.close();
  }
}

// Up to the point where they leave; all of each has ended when close() returns.
void tasks_that_leave_run_in_order() {
  std::vector<int> order;
  std::atomic<int> num_ended{0};
  ProgressQueue queue(ProgressQueue::Placement::kCoreOfCaller);
  for (int i = 0; i < 1000; ++i) {
    queue.enqueue([&, i] {
      order.push_back(i);
      if (i % 3 == 0) return;
      ProgressQueue::leave();
      ProgressQueue::leave();
      ++num_ended;
    });
  }
  queue.close();
  check_equal(num_ended.load(), 666, "tasks that have left and ended");
  check_equal(order.size(), 1000, "tasks run");
  for (int i = 0; i < 1000; ++i) check_equal(order[static_cast<size_t>(i)], i, "task");
}

// And the queue is idle meanwhile.
void close_waits_for_a_task_that_has_left() {
  for (int round = 0; round < 100; ++round) {
    std::atomic<bool> has_ended{false};
    std::latch may_end(1);
    ProgressQueue queue;
    queue.enqueue([&] {
      ProgressQueue::leave();
      may_end.wait();
      has_ended = true;
    });
    wait_until_idle(queue);
    std::thread other([&] { may_end.count_down(); });
    queue.close();
    check(has_ended.load(), "close() has waited");
    other.join();
  }
}

void tasks_that_have_left_close_each_others_queue() {
  std::atomic<int> num_ended{0};
  for (int round = 0; round < 100; ++round) {
    std::list<ProgressQueue> queues(2);
    std::barrier both(2);
    const auto close = [&](ProgressQueue& other) {
      ProgressQueue::leave();
      both.arrive_and_wait();
      other.close();
      ++num_ended;
    };
    queues.front().enqueue([&] { close(queues.back()); });
    queues.back().enqueue([&] { close(queues.front()); });
    per_process<ProgressPool>().await_all();
    check_equal(num_ended.load(), 2 * (round + 1), "tasks that have ended before the pool is idle");
  }
}

const CaseTable kCases{
    {"progress_queue_idle", idle_queue_has_done_its_tasks},
    {"progress_pool_idle_queues", idle_queues_keep_no_thread},
    {"progress_pool_orders-ws2", groups_in_different_orders_do_not_block_each_other},
    {"progress_pool_close_beside_others", close_does_not_wait_for_other_queues},
    {"progress_pool_nothing_after_close", nothing_runs_after_close},
    {"progress_pool_queue_destroyed_by_task", task_destroys_its_queue},
    {"progress_pool_placement", thread_leaves_the_core_of_another_queues_caller},
    {"progress_queue_left_waits", task_that_has_left_waits_for_a_later_one},
    {"progress_queue_left_order", tasks_that_leave_run_in_order},
    {"progress_queue_left_close", close_waits_for_a_task_that_has_left},
    {"progress_queue_left_close_each_other", tasks_that_have_left_close_each_others_queue},
};

}  // namespace
}  // namespace rota::test
