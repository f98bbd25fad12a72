// Ranks as real processes over shared memory: collectives, protection of the regions, death, fork.
#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/fork_safe.h"
#include "calls.h"
#include "check.h"
#include "core/point_to_point.h"
#include "core/progress_queue.h"
#include "core/watch.h"
#include "processes.h"
#include "ranks.h"
#include "transport/bootstrap.h"
#include "transport/handshake.h"
#include "transport/listener.h"

namespace rota::test {
namespace {

using transport::SharedMemoryRank;
using transport::UniqueFd;

Communicator make_communicator(const TemporaryDirectory& directory, int rank, int world_size) {
  return {connect(directory, rank, world_size), kPatience, [] {}};
}

void barrier(Communicator& communicator) { communicator.barrier(CallerThread::kProgress); }

void collectives_between_processes(int world_size) {
  const TemporaryDirectory directory;
  run_processes(world_size, [&](int rank) {
    Communicator communicator = make_communicator(directory, rank, world_size);
    Random same_on_all_ranks(7);
    for (uint64_t seed = 0; seed < 300; ++seed) {
      call_and_check(communicator, random_call(same_on_all_ranks, communicator.world_size()), seed,
                     seed % 2 == 0 ? CallerThread::kUser : CallerThread::kProgress);
    }
  });
}

// ---- protection ----

// A child that writes to a byte of another rank's control block is killed.
void peers_control_block_is_read_only() {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    auto transport = connect(directory, rank, 2);
    transport->own_control().abort_text[0] = 'x';
    const auto& control = transport->region(1 - rank).control();
    const auto* words = reinterpret_cast<const char*>(&control);
    for (const size_t offset : {size_t{0}, sizeof(control) - 1}) {
      const pid_t writer = start_process([&] {
        signal(SIGSEGV, SIG_DFL);  // AddressSanitizer would report and exit instead
        const_cast<volatile char*>(words)[offset] = 1;
      });
      check_equal(wait_for_process(writer), Exit{.signal = SIGSEGV}, "end of who wrote");
    }
    Communicator communicator(std::move(transport), kPatience, [] {});
    barrier(communicator);
  });
}

UniqueFd make_memory(size_t num_bytes, int seals) {
  UniqueFd memory(memfd_create("rota-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(ftruncate(memory.get(), static_cast<off_t>(num_bytes)) == 0, "ftruncate");
  check(fcntl(memory.get(), F_ADD_SEALS, seals) == 0, "F_ADD_SEALS");
  return memory;
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void memory_is_sealed() {
  const auto own = transport::OwnMemory::make(kSmall, 2);
  const int memory = own.memory.get();
  check_equal(fcntl(memory, F_GET_SEALS) & kSeals, kSeals, "seals");
  check((fcntl(memory, F_GETFD) & FD_CLOEXEC) != 0, "the descriptor ends with exec");
  struct stat status{};
  check(fstat(memory, &status) == 0, "fstat");
  check_equal(static_cast<size_t>(status.st_size), kSmall.num_bytes(2), "bytes");
  const size_t num_reserved = static_cast<size_t>(status.st_blocks) * 512;
  check(num_reserved >= sizeof(transport::ControlBlock), "the control block is reserved");
  check(num_reserved < kSmall.num_bytes(2), "what nobody has used yet is not");
  check(ftruncate(memory, 0) != 0, "shrinking fails");
  check(ftruncate(memory, 1 << 24) != 0, "growing fails");
  check(fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE) != 0, "another seal fails");
}

// Both sides of the handshake refuse it.
void unsafe_memory_is_refused(size_t num_bytes, int seals) {
  const TemporaryDirectory directory;
  run_processes(2, [&](int index) {
    FileStore store(directory);
    if (index == 0) {
      transport::SharedMemoryRank rank(store, 0, 2, kSmall);
      store.await("refused");
      const Error error =
          expect_error(ErrorKind::kTransport, [&] { rank.connect(kPatience, [] {}); });
      check_contains(error.what(), "rank 1 handed over memory");
      store.set("end", "1");
      return;
    }
    transport::Bootstrap bootstrap(store, 1, 2, kSmall,
                                   [&] { return make_memory(num_bytes, seals); });
    const Error error =
        expect_error(ErrorKind::kTransport, [&] { bootstrap.rendezvous(kPatience, [] {}); });
    check_contains(error.what(), "rank 0 refused the handshake: rota: rank 1 handed over memory");
    store.set("refused", "1");
    store.await("end");
  });
}

// A process with a timer (a profiler, say) gets signals while its memory is reserved.
void signals_do_not_disturb_connect() {
  const TemporaryDirectory directory;
  run_processes(1, [&](int rank) {
    struct sigaction action{};
    action.sa_handler = [](int) {};
    check(sigaction(SIGALRM, &action, nullptr) == 0, "sigaction");
    const timeval period{.tv_sec = 0, .tv_usec = 1000};
    const itimerval timer{period, period};
    check(setitimer(ITIMER_REAL, &timer, nullptr) == 0, "setitimer");
    FileStore store(directory);
    const transport::Geometry geometry{
        .message_bytes = 1024, .slot_bytes = 8 << 20, .num_cells = 6};
    SharedMemoryRank(store, rank, 1, geometry).connect(kPatience, [] {});
  });
}

// ---- death ----

constexpr uint64_t kEpoch = 17;

// Rank 2 has completed that epoch and ends by end(), and rank 0 looks for failures while it waits
// for `awaited` in epoch 17. It must report expected_error, or nothing if that is empty.
void watch_a_rank_end(uint64_t completed, const std::function<void(Communicator&)>& end,
                      int awaited, Exit expected_end, std::string_view expected_error) {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank) {
    pids.push_back(start_process([&, rank] {
      auto transport = connect(directory, rank, 3);
      FileStore store(directory);
      if (rank == 2) {
        transport->own_control().completed.record(completed);
        Communicator communicator(std::move(transport), kPatience, [] {});
        return end(communicator);
      }
      store.await("rank 2 has ended");
      if (rank == 1) return (void)store.await("rank 0 has looked");
      Watch watch(*transport, kPatience, /*check_interrupt=*/nullptr);
      watch.begin_collective("all_reduce", kEpoch, /*lets_signals_through=*/false);
      watch.begin_wait(awaited, "ring receive", 3);
      const auto error = watch.tick(Nanoseconds(0));
      store.set("rank 0 has looked", "1");
      check_equal(error.has_value(), !expected_error.empty(),
                  error ? error->what() : "whether rank 0 noticed something");
      if (!error) return;
      check_equal(static_cast<int>(error->kind()), static_cast<int>(ErrorKind::kPeerFailed),
                  "kind");
      check_contains(error->what(), expected_error);
      for (const char* part : {"rank 2 (pid ", "epoch 17", "ring receive", "step 3"}) {
        check_contains(error->what(), part);
      }
    }));
  }
  check_equal(wait_for_process(pids[2]), expected_end, "end of rank 2");
  FileStore(directory).set("rank 2 has ended", "1");
  check_equal(wait_for_process(pids[0]), Exit{}, "end of rank 0");
  check_equal(wait_for_process(pids[1]), Exit{}, "end of rank 1");
}

void killed_peer_is_noticed_whoever_is_awaited() {
  for (const int awaited : {1, 2}) {
    watch_a_rank_end(
        kEpoch - 1, [](Communicator&) { raise(SIGKILL); }, awaited, Exit{.signal = SIGKILL},
        "has died");
  }
}

void closed_peer_is_noticed_whoever_is_awaited() {
  for (const int awaited : {1, 2}) {
    watch_a_rank_end(kEpoch - 1, [](Communicator&) {}, awaited, Exit{}, "has left");
  }
}

// A rank may close, or end without a word, as soon as it is done, while others still exchange the
// last chunks.
void peer_that_has_done_its_part_may_end() {
  for (const int awaited : {1, 2}) {
    watch_a_rank_end(
        kEpoch, [](Communicator&) { raise(SIGKILL); }, awaited, Exit{.signal = SIGKILL}, "");
    watch_a_rank_end(kEpoch, [](Communicator&) {}, awaited, Exit{}, "");
  }
}

// ---- fork ----

// The queue's thread does not exist in the child, which must not wait for it.
void child_closes_its_queue() {
  ProgressQueue queue;
  queue.enqueue([] {});
  while (!queue.is_idle()) std::this_thread::yield();
  check_equal(wait_for_process(start_process([&] { queue.close(); })), Exit{}, "end of the child");
}

void child_queues_work_of_its_own() {
  ProgressQueue queue;
  std::atomic<bool> has_begun{false}, may_end{false};
  queue.enqueue([&] {
    has_begun = true;
    may_end.wait(false);
  });
  // A starting thread allocates memory. Unlike glibc's allocator, AddressSanitizer's does not
  // survive a fork in the middle of that.
  while (!has_begun) std::this_thread::yield();
  const pid_t child = start_process([] {
    int sum = 0;
    ProgressQueue own_queue;
    for (int i = 0; i < 10; ++i) own_queue.enqueue([&sum] { ++sum; });
    own_queue.close();
    check_equal(sum, 10, "tasks run in the child");
  });
  check_equal(wait_for_process(child), Exit{}, "end of the child");
  may_end = true;
  may_end.notify_all();
}

void child_drops_what_a_thread_waits_on() {
  std::optional<ForkSafe<std::condition_variable>> ended(std::in_place);
  std::mutex mutex;
  bool is_waiting = false, is_ending = false;
  ForkSafe<std::thread> waiter([&] {
    std::unique_lock lock(mutex);
    is_waiting = true;
    (*ended)->wait(lock, [&] { return is_ending; });
  });
  const auto has_begun_to_wait = [&] {
    const std::lock_guard lock(mutex);
    return is_waiting;
  };
  while (!has_begun_to_wait()) std::this_thread::yield();
  check_equal(wait_for_process(start_process([&] { ended.reset(); })), Exit{}, "end of the child");
  {
    const std::lock_guard lock(mutex);
    is_ending = true;
  }
  (*ended)->notify_all();
  waiter->join();
}

// The thread that attends to requests stays a while after the last one, waiting for another.
void child_closes_links_that_a_thread_attends() {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    auto communicator =
        std::make_unique<Communicator>(connect(directory, rank, 2), kPatience, [] {});
    PointToPoint& links = communicator->point_to_point();
    std::byte received{}, sent{};
    const Message message{.tag = 0, .dtype = DType::kUInt8, .num_elems = 1};
    const RequestRef recv = links.recv(&received, message, 1 - rank, nullptr);
    links.attend(*recv, nullptr);
    barrier(*communicator);
    const RequestRef send = links.send(&sent, message, 1 - rank, nullptr);
    for (const auto& request : {recv, send}) links.wait(*request, CallerThread::kUser, {});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const pid_t child = start_process([&] { communicator.reset(); });
    check_equal(wait_for_process(child), Exit{}, "end of the child");
    barrier(*communicator);
  });
}

// A child that is forked before the listener's thread closes a connection has a copy of it.
void child_does_not_keep_a_client_waiting() {
  struct Forking : transport::Exposed {
    void answer(UniqueFd&, transport::ReceivedHello&) override {
      child = start_process([] { pause(); });
    }
    std::atomic<pid_t> child = 0;
  } forking;
  const auto listener = transport::Listener::open();
  listener->add(1, forking);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const Error error = expect_error(ErrorKind::kTransport, [&] {
    transport::ask(listener->address_of(1), 0, {}, "the listener", "no answer", [&] {
      check(std::chrono::steady_clock::now() < deadline, "the client still waits");
    });
  });
  check_contains(error.what(), "no answer");
  listener->remove(1);
  kill(forking.child, SIGKILL);
  wait_for_process(forking.child);
}

// The children of ranks form their own group, beside that of their parents.
void children_make_a_group_of_their_own() {
  const TemporaryDirectory directory, directory_of_children;
  run_processes(2, [&](int rank) {
    Communicator communicator = make_communicator(directory, rank, 2);
    const pid_t child = start_process([&] {
      Communicator of_children = make_communicator(directory_of_children, rank, 2);
      for (int i = 0; i < 10; ++i) barrier(of_children);
    });
    for (int i = 0; i < 10; ++i) barrier(communicator);
    check_equal(wait_for_process(child), Exit{}, "end of the child");
  });
}

// ---- deaths ----

// So that its end is noticed at once.
void connected_processes_hold_their_lives() {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    auto transport = connect(directory, rank, 2);
    const LifeWord* life = transport->life_of(1 - rank);
    Communicator communicator(std::move(transport), kPatience, [] {});
    barrier(communicator);
    check(life != nullptr, "the peer's word is mapped");
    while (!LifeWord::is_held(life->load())) sched_yield();  // its thread may not have begun yet
    barrier(communicator);
  });
}

// ---- descriptors ----

const CaseTable kCases{
    {"shared_memory_collectives-ws2", [] { collectives_between_processes(2); }},
    {"shared_memory_read_only", peers_control_block_is_read_only},
    {"shared_memory_sealed", memory_is_sealed},
    {"shared_memory_unsealed_refused",
     [] { unsafe_memory_is_refused(kSmall.num_bytes(2), F_SEAL_GROW); }},
    {"shared_memory_short_refused",
     [] { unsafe_memory_is_refused(kSmall.num_bytes(2) - 4096, kSeals); }},
    {"shared_memory_signals", signals_do_not_disturb_connect},
    {"killed_peer_noticed-ws3", killed_peer_is_noticed_whoever_is_awaited},
    {"closed_peer_noticed-ws3", closed_peer_is_noticed_whoever_is_awaited},
    {"peer_ended_behind_its_part-ws3", peer_that_has_done_its_part_may_end},
    {"forked_child_closes_queue", child_closes_its_queue},
    {"forked_child_queues", child_queues_work_of_its_own},
    {"forked_child_drops_condition", child_drops_what_a_thread_waits_on},
    {"forked_child_drops_links-ws2", child_closes_links_that_a_thread_attends},
    {"forked_child_keeps_no_client", child_does_not_keep_a_client_waiting},
    {"forked_children_make_group-ws2", children_make_a_group_of_their_own},
    {"lives_held", connected_processes_hold_their_lives},
};

}  // namespace
}  // namespace rota::test
