// The heap that peers read in place: allocation, and that a rank reports an error instead of using
// data that it read from a rank which had given up. That read races with the owner's writes, as
// ThreadSanitizer reports, so the reader must notice.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "base/per_process.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "processes.h"
#include "ranks.h"
#include "transport/heap.h"
#include "transport/peer_processes.h"

namespace rota::test {
namespace {

using transport::Heap;
using transport::PeerProcess;
using transport::UniqueFd;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

std::byte* allocate(Heap& heap, size_t num_bytes) {
  return static_cast<std::byte*>(heap.allocate(num_bytes));
}

void gaps_are_used_again() {
  Heap heap;
  check(heap.contents().empty(), "nothing is mapped before it is used");
  std::byte* first = allocate(heap, 1);
  std::byte* second = allocate(heap, 3 * page_bytes() - 1);
  std::byte* third = allocate(heap, 0);
  check(second == first + page_bytes() && third == second + 3 * page_bytes(), "whole pages");
  std::memset(second, 1, 3 * page_bytes());
  heap.release(second);
  std::byte* in_gap = allocate(heap, 2 * page_bytes());
  check(in_gap == second, "the gap is used again");
  check(*in_gap == std::byte{0}, "and holds zeroes");
  check(allocate(heap, 2 * page_bytes()) == third + page_bytes(), "what is left is too short");
  check(allocate(heap, page_bytes()) == second + 2 * page_bytes(), "but long enough for a page");

  int elsewhere = 0;
  check_equal(heap.offset_of(first).value_or(0), page_bytes(), "the offset after the first page");
  check_equal(heap.offset_of(third - 1).value_or(0), 5 * page_bytes() - 1, "an offset inside");
  check(!heap.offset_of(&elsewhere), "memory that lies elsewhere has no offset");
  check(!heap.offset_of(nullptr), "nor has none");
}

// Each signal cancels the kernel's reservation in progress.
void signals_do_not_end_a_reservation() {
  raise_alarms();
  Heap heap;
  heap.allocate(size_t{256} << 20);
}

void more_than_there_is_is_refused() {
  Heap heap;
  for (const size_t num_bytes : {size_t{1} << 50, ~size_t{0}}) {
    expect_error(ErrorKind::kTransport, [&] { heap.allocate(num_bytes); },
                 {join("cannot reserve ", num_bytes, " bytes of shared memory"), "bytes free"});
  }
  heap.allocate(1);
}

void peers_read_and_do_not_write() {
  Heap heap;
  std::byte* const own = allocate(heap, 1);
  *own = std::byte{7};
  PeerProcess peer(getpid(), UniqueFd());
  const UniqueFd unsealed = transport::create_memory("rota-test", 1);
  expect_error(ErrorKind::kTransport,
               [&] { PeerProcess(getpid(), UniqueFd()).take_heap(unsealed); });
  peer.take_heap(heap.memory());
  peer.take_heap(heap.memory());  // as for another group of the same process
  const std::byte& read = peer.heap()[*heap.offset_of(own)];
  check_equal(static_cast<int>(read), 7, "what the owner wrote");
  const Exit exit = wait_for_process(start_process([&] {
    signal(SIGSEGV, SIG_DFL);
    const_cast<std::byte&>(read) = std::byte{1};
  }));
  check_equal(exit.signal, SIGSEGV, "the end of a process that writes");
}

// Memory that blocks the first thread that touches it until is_resumed is set.
class StoppingPage {
 public:
  StoppingPage() {
    data_ = mmap(nullptr, kNumBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(data_ != MAP_FAILED, "mmap");
    struct sigaction action{};
    action.sa_handler = [](int) {
      mprotect(data_, kNumBytes, PROT_READ | PROT_WRITE);
      is_touched = true;
      while (!is_resumed) usleep(100);
    };
    check(sigaction(SIGSEGV, &action, nullptr) == 0, "sigaction");
  }

  static constexpr size_t kNumBytes = 64 << 10;
  static inline std::atomic<bool> is_touched{false};
  static inline std::atomic<bool> is_resumed{false};
  void* data() const { return data_; }

 private:
  static inline void* data_;
};

void what_was_read_of_a_rank_that_gave_up_is_an_error() {
  const StoppingPage page;
  const Call call = Planner(2).collective(CollectiveKind::kBroadcast, DType::kUInt8,
                                          StoppingPage::kNumBytes, ReduceOp::kSum, 0);
  run_ranks(2, [&](Communicator& communicator) {
    const auto broadcast = [&](void* data) {
      return expect_error(ErrorKind::kPeerFailed,
                          [&] { communicator.run(call, {.data = data}, CallerThread::kProgress); });
    };
    if (communicator.rank() == 1) {
      check_contains(broadcast(page.data()).what(), "rank 0 (a thread) failed: enough");
      return;
    }
    const std::jthread other([&] {
      while (!StoppingPage::is_touched) std::this_thread::yield();
      communicator.abort("enough");
    });
    auto& heap = per_process<Heap>();
    void* tensor = heap.allocate(StoppingPage::kNumBytes);
    broadcast(tensor);
    heap.release(tensor);  // rank 1 goes on reading zeroes, or whatever is allocated here next
    StoppingPage::is_resumed = true;
  });
}

const CaseTable kCases{
    {"heap_gaps", gaps_are_used_again},
    {"heap_signals", signals_do_not_end_a_reservation},
    {"heap_shortage", more_than_there_is_is_refused},
    {"heap_readers", peers_read_and_do_not_write},
    {"heap_given_up", what_was_read_of_a_rank_that_gave_up_is_an_error},
};

}  // namespace
}  // namespace rota::test
