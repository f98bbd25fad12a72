// Ranks as real processes over shared memory: collectives, protection of the regions, death, fork.
#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <latch>
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

void barrier(Communicator& communicator) { communicator.barrier(CallerThread::kProgress); }

void collectives_between_processes(int world_size) {
  run_processes(world_size, [&](int rank, FileStore& store) {
    Communicator communicator = make_communicator(store, rank, world_size);
    Random same_on_all_ranks(7);
    for (uint64_t seed = 0; seed < 300; ++seed) {
      call_and_check(communicator, random_call(same_on_all_ranks, communicator.world_size()), seed,
                     seed % 2 == 0 ? CallerThread::kUser : CallerThread::kProgress);
    }
  });
}

void peers_control_block_is_read_only() {
  run_processes(2, [&](int rank, FileStore& store) {
    auto transport = connect(store, rank, 2);
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

// Both sides of the handshake refuse it. leaves: whether rank 1 does, before rank 0 connects; it is
// told of the refusal all the same.
void unsafe_memory_is_refused(size_t num_bytes, int seals, bool leaves) {
  run_processes(2, [&](int rank, FileStore& store) {
    if (rank == 0) {
      SharedMemoryRank own(store, 0, 2, kSmall);
      store.await("refused");
      expect_error(ErrorKind::kTransport, [&] { own.connect(kPatience, [] {}); },
                   {"rank 1 handed over memory"});
      store.set("end");
      return;
    }
    std::optional<transport::Bootstrap> bootstrap(std::in_place, store, 1, 2, kSmall,
                                                  [&] { return make_memory(num_bytes, seals); });
    expect_error(ErrorKind::kTransport, [&] { bootstrap->rendezvous(kPatience, [] {}); },
                 {"rank 0 refused the handshake: rota: rank 1 handed over memory"});
    if (leaves) bootstrap.reset();
    store.set("refused");
    store.await("end");
  });
}

// A process with a timer (a profiler, say) gets signals while its memory is reserved.
void signals_do_not_disturb_connect() {
  run_processes(1, [](int rank, FileStore& store) {
    raise_alarms();
    const transport::Geometry geometry{
        .message_bytes = 1024, .slot_bytes = 8 << 20, .num_cells = 6};
    SharedMemoryRank(store, rank, 1, geometry).connect(kPatience, [] {});
  });
}

constexpr uint64_t kEpoch = 17;

// Rank 2 has completed that epoch and is killed, or closes, while rank 0 waits for a rank in epoch
// 17. It must report expected_error, whoever is awaited, or nothing if that is empty: a rank may
// end, also without a word, as soon as it is done, while others still exchange the last chunks.
void a_rank_ends(uint64_t completed, bool is_killed, std::string_view expected_error) {
  for (const int awaited : {1, 2}) {
    const TemporaryDirectory directory;
    FileStore store(directory);
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 3; ++rank) {
      pids.push_back(start_process([&, rank] {
        auto transport = connect(store, rank, 3);
        if (rank == 2) {
          transport->own_control().completed.record(completed);
          const Communicator communicator(std::move(transport), kPatience, [] {});
          if (is_killed) raise(SIGKILL);
          return;
        }
        store.await("rank 2 has ended");
        if (rank == 1) return (void)store.await("rank 0 has looked");
        Watch watch(*transport, kPatience, /*check_interrupt=*/nullptr);
        watch.begin_collective("all_reduce", kEpoch, /*lets_signals_through=*/false);
        watch.begin_wait(awaited, "ring receive", 3);
        const auto error = watch.tick(Nanoseconds(0));
        store.set("rank 0 has looked");
        check_equal(error.has_value(), !expected_error.empty(),
                    error ? error->what() : "whether rank 0 noticed something");
        if (!error) return;
        check(error->kind() == ErrorKind::kPeerFailed, "kind");
        for (const char* part : {"rank 2 (pid ", "epoch 17", "ring receive", "step 3"}) {
          check_contains(error->what(), part);
        }
        check_contains(error->what(), expected_error);
      }));
    }
    check_equal(wait_for_process(pids[2]), Exit{.signal = is_killed ? SIGKILL : 0}, "rank 2");
    store.set("rank 2 has ended");
    check_equal(wait_for_process(pids[0]), Exit{}, "end of rank 0");
    check_equal(wait_for_process(pids[1]), Exit{}, "end of rank 1");
  }
}

// The queue's thread does not exist in the child, which must not wait for it.
void child_closes_its_queue() {
  ProgressQueue queue;
  queue.enqueue([] {});
  while (!queue.is_idle()) std::this_thread::yield();
  check_child([&] { queue.close(); });
}

void child_queues_work_of_its_own() {
  ProgressQueue queue;
  std::latch has_begun(1), may_end(1);
  queue.enqueue([&] {
    has_begun.count_down();
    may_end.wait();
  });
  // A starting thread allocates memory. Unlike glibc's allocator, AddressSanitizer's does not
  // survive a fork in the middle of that.
  has_begun.wait();
  check_child([] {
    int sum = 0;
    ProgressQueue own_queue;
    for (int i = 0; i < 10; ++i) own_queue.enqueue([&sum] { ++sum; });
    own_queue.close();
    check_equal(sum, 10, "tasks run in the child");
  });
  may_end.count_down();
}

void child_drops_what_a_thread_waits_on() {
  std::optional<ForkSafe<std::condition_variable>> ended(std::in_place);
  std::mutex mutex;
  std::latch has_begun(1);
  bool is_ending = false;
  ForkSafe<std::thread> waiter([&] {
    std::unique_lock lock(mutex);
    has_begun.count_down();
    (*ended)->wait(lock, [&] { return is_ending; });
  });
  has_begun.wait();
  std::unique_lock lock(mutex);  // once it waits
  lock.unlock();
  check_child([&] { ended.reset(); });
  lock.lock();
  is_ending = true;
  lock.unlock();
  (*ended)->notify_all();
  waiter->join();
}

// The thread that attends to requests stays a while after the last one, waiting for another.
void child_closes_links_that_a_thread_attends() {
  run_processes(2, [&](int rank, FileStore& store) {
    auto communicator = std::make_unique<Communicator>(connect(store, rank, 2), kPatience, [] {});
    PointToPoint& links = communicator->point_to_point();
    std::byte received{}, sent{};
    const Message message{.tag = 0, .dtype = DType::kUInt8, .num_elems = 1};
    const RequestRef recv = links.recv(&received, message, 1 - rank, nullptr);
    links.attend(*recv, nullptr);
    barrier(*communicator);
    const RequestRef send = links.send(&sent, message, 1 - rank, nullptr);
    for (const auto& request : {recv, send}) links.wait(*request, CallerThread::kUser, {});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    check_child([&] { communicator.reset(); });
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
  expect_error(ErrorKind::kTransport,
               [&] {
                 transport::ask(listener->address_of(1), 0, {}, "the listener", "no answer", [&] {
                   check(std::chrono::steady_clock::now() < deadline, "the client still waits");
                 });
               },
               {"no answer"});
  listener->remove(1);
  kill(forking.child, SIGKILL);
  wait_for_process(forking.child);
}

void children_make_a_group_of_their_own() {
  const TemporaryDirectory directory_of_children;
  run_processes(2, [&](int rank, FileStore& store) {
    Communicator communicator = make_communicator(store, rank, 2);
    const pid_t child = start_process([&] {
      FileStore store_of_children(directory_of_children);
      Communicator of_children = make_communicator(store_of_children, rank, 2);
      for (int i = 0; i < 10; ++i) barrier(of_children);
    });
    for (int i = 0; i < 10; ++i) barrier(communicator);
    check_equal(wait_for_process(child), Exit{}, "end of the child");
  });
}

// So that its end is noticed at once.
void connected_processes_hold_their_lives() {
  run_processes(2, [&](int rank, FileStore& store) {
    auto transport = connect(store, rank, 2);
    const LifeWord* life = transport->life_of(1 - rank);
    Communicator communicator(std::move(transport), kPatience, [] {});
    barrier(communicator);
    check(life != nullptr, "the peer's word is mapped");
    while (!LifeWord::is_held(life->load())) sched_yield();  // its thread may not have begun yet
    barrier(communicator);
  });
}

const CaseTable kCases{
    {"shared_memory_collectives-ws2", collectives_between_processes, 2},
    {"shared_memory_read_only", peers_control_block_is_read_only},
    {"shared_memory_sealed", memory_is_sealed},
    {"shared_memory_unsealed_refused", unsafe_memory_is_refused, kSmall.num_bytes(2), F_SEAL_GROW,
     false},
    {"shared_memory_refused_leaver", unsafe_memory_is_refused, kSmall.num_bytes(2), 0, true},
    {"shared_memory_short_refused", unsafe_memory_is_refused, kSmall.num_bytes(2) - 4096, kSeals,
     false},
    {"shared_memory_signals", signals_do_not_disturb_connect},
    {"killed_peer_noticed-ws3", a_rank_ends, kEpoch - 1, true, "has died"},
    {"closed_peer_noticed-ws3", a_rank_ends, kEpoch - 1, false, "has left"},
    {"peer_killed_behind_its_part-ws3", a_rank_ends, kEpoch, true, ""},
    {"peer_closed_behind_its_part-ws3", a_rank_ends, kEpoch, false, ""},
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
