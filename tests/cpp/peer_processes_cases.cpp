// A process's table of its peers' processes: one entry for each, however many groups share it. An
// eventfd stands in for a pidfd, which also becomes readable, once its process has ended.
#include "transport/peer_processes.h"

#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "base/waiter.h"
#include "check.h"
#include "open_files.h"
#include "ranks.h"
#include "transport/heap.h"

namespace rota::test {
namespace {

using transport::Heap;
using transport::LifeHolder;
using transport::PeerProcess;
using transport::PeerProcesses;
using transport::UniqueFd;
using ProcessRef = std::shared_ptr<const PeerProcess>;

UniqueFd make_pidfd(bool has_ended = false) {
  return UniqueFd(eventfd(has_ended ? 1 : 0, EFD_CLOEXEC));
}

void process_found_again_is_the_same() {
  PeerProcesses table;
  const int64_t num_files = num_open_files();
  {
    std::vector<ProcessRef> of_groups{table.find(getpid(), make_pidfd())};
    for (int i = 0; i < 20; ++i) of_groups.push_back(table.find(getpid(), make_pidfd()));
    for (const ProcessRef& process : of_groups) check(process == of_groups[0], "one process");
    check_equal(of_groups[0]->pid(), getpid(), "pid");
    check_num_open_files(num_files + 1, "descriptors of one process in 21 groups");
    of_groups.erase(of_groups.begin());
    check_num_open_files(num_files + 1, "descriptors after the first group is gone");
    check(table.find(getppid(), make_pidfd()) != of_groups[0], "two processes");
  }
  check_num_open_files(num_files, "descriptors after all groups are gone");
  table.find(getpid(), make_pidfd());
  check_num_open_files(num_files, "descriptors of one that nobody keeps");
}

// The pid of a process that has ended is given to another one.
void reused_pid_is_another_process() {
  PeerProcesses table;
  UniqueFd pidfd = make_pidfd();
  const UniqueFd first_pidfd(dup(pidfd.get()));
  const ProcessRef first = table.find(getpid(), std::move(pidfd));
  check(PeerProcess::find_ended({first.get()}).empty(), "the first process is there");
  check(eventfd_write(first_pidfd.get(), 1) == 0, "the first process ends");
  const ProcessRef second = table.find(getpid(), make_pidfd());
  check(second != first, "the second process is not taken for the first");
  check(PeerProcess::find_ended({second.get(), first.get()}) == std::vector<size_t>{1},
        "the first process has ended, the second has not");
  check(table.find(getpid(), make_pidfd()) == second, "the second process is found again");
  const ProcessRef ended = table.find(getpid(), make_pidfd(/*has_ended=*/true));
  check(ended != second, "one that has ended is not taken for one that has not");
}

// Processes in another PID namespace have no pid here: it reads as 0.
void processes_without_pid_are_kept_apart() {
  PeerProcesses table;
  const ProcessRef first = table.find(0, make_pidfd());
  check(table.find(0, make_pidfd()) != first, "two processes");
}

void own_process_never_ends() {
  const PeerProcess own(getpid(), UniqueFd());
  check(PeerProcess::find_ended({&own}).empty(), "the own process is there");
  check(own.is_running(), "the own process runs");
}

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

// Waits for a flag that nobody publishes, until the process ends.
class UntilItEnds final : public WaitObserver {
 public:
  explicit UntilItEnds(const PeerProcess& process) : process_(process) {}

  std::optional<Error> poll() override { return std::nullopt; }
  std::optional<Error> tick(Nanoseconds) override {
    if (process_.is_running()) return std::nullopt;
    return Error(ErrorKind::kPeerFailed, "it has ended");
  }
  std::vector<const LifeWord*> lives() const override { return {process_.life()}; }

 private:
  const PeerProcess& process_;
};

void life_of_a_killed_process_ends() {
  Heap heap;
  const pid_t child = fork();
  if (child == 0) {
    const LifeHolder holder(heap.words().life);
    while (true) pause();
  }
  PeerProcess process(child, open_pidfd(child));
  process.take_words(heap.memory());
  while (!LifeWord::is_held(process.life()->load())) sched_yield();
  check(process.is_running(), "the child runs");
  kill(child, SIGKILL);
  // Several threads, of which the kernel wakes one.
  run_threads(3, [&](int) {
    Flag own_sleeping{};
    const Flag never{};
    UntilItEnds observer(process);
    Waiter waiter(&own_sleeping, {});
    expect_error(ErrorKind::kPeerFailed, [&] { waiter.wait(never, 1, {}, observer); });
  });
  check(process.life()->is_ending(), "the kernel has marked the word");
  waitpid(child, nullptr, 0);
}

void life_is_held_by_one_thread_at_a_time() {
  Heap heap;
  PeerProcess process(getpid(), open_pidfd(getpid()));
  process.take_words(heap.memory());
  const LifeWord& word = *process.life();
  check(process.is_running(), "a process that does not hold its life runs");
  std::latch has_first(1);
  std::atomic<bool> is_over = false;
  std::thread first([&] {
    const LifeHolder holder(heap.words().life);
    has_first.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    is_over = true;
  });
  has_first.wait();
  {
    const LifeHolder second(heap.words().life);
    check(is_over, "the second thread waits until the first lets go");
    first.join();
    check(LifeWord::is_held(word.load()), "the second thread holds it after the first has ended");
  }
  check_equal(word.load(), 0U, "the word once both have let go");
  check(process.is_running(), "the process runs on");
}

void threads_find_one_process() {
  constexpr int kNumThreads = 4;
  PeerProcesses table;
  for (int round = 0; round < 50; ++round) {
    std::vector<ProcessRef> found(kNumThreads);
    run_threads(kNumThreads, [&](int thread) {
      found[static_cast<size_t>(thread)] = table.find(getpid(), make_pidfd());
    });
    for (const ProcessRef& process : found) check(process == found[0], "one process");
  }
}

const CaseTable kCases{
    {"peer_processes_found_again", process_found_again_is_the_same},
    {"peer_processes_reused_pid", reused_pid_is_another_process},
    {"peer_processes_no_pid", processes_without_pid_are_kept_apart},
    {"peer_processes_own_process", own_process_never_ends},
    {"peer_processes_life_of_killed", life_of_a_killed_process_ends},
    {"peer_processes_life_of_threads", life_is_held_by_one_thread_at_a_time},
    {"peer_processes_threads", threads_find_one_process},
};

}  // namespace
}  // namespace rota::test
