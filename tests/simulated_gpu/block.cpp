#include "block.h"

#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace simulated_gpu {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kPageBytes = 4096;
// Looks at a word, by all threads together since the last barrier, before the block sleeps between
// looks, and how long.
constexpr uint32_t kQuickPauses = 1000;
constexpr useconds_t kPauseUs = 50;
// Naps of one block in a launch.
constexpr int kMaxNaps = 3;

thread_local Block* running_block = nullptr;

// Stacks that are not in use, of every block that ever ran.
class Stacks {
 public:
  std::byte* take() {
    {
      const std::lock_guard guard(mutex_);
      if (!free_.empty()) {
        std::byte* stack = free_.back();
        free_.pop_back();
        return stack;
      }
    }
    void* mapped = mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("simulated GPU: no memory for the stack of a thread");
      std::abort();
    }
    mprotect(mapped, kPageBytes, PROT_NONE);
    return static_cast<std::byte*>(mapped) + kPageBytes;
  }
  void give_back(std::byte* stack) {
    const std::lock_guard guard(mutex_);
    free_.push_back(stack);
  }

 private:
  std::mutex mutex_;
  std::vector<std::byte*> free_;
};

// Never destroyed: blocks may run while the process ends.
Stacks& stacks() {
  static auto* all = new Stacks;
  return *all;
}

}  // namespace

Block::Block(const Shape& shape, uint64_t seed, uint64_t max_nap_us, const std::string& kernel)
    : shape_(shape),
      random_(seed),
      max_nap_us_(max_nap_us),
      kernel_(kernel),
      threads_(static_cast<size_t>(shape.num_threads)) {
  for (Thread& thread : threads_) thread.stack = stacks().take();
  for (int lanes = 1; lanes <= kMostLanes; lanes *= 2) {
    lane_barriers_[lanes].resize(static_cast<size_t>(shape.num_threads / lanes));
  }
}

Block::~Block() {
  for (Thread& thread : threads_) stacks().give_back(thread.stack);
}

Block& Block::current() { return *running_block; }

void Block::run(const std::function<void()>& body) {
  body_ = &body;
  running_block = this;
  if (random_.below(4) == 0) nap();
  if (_setjmp(outside_) == 0) enter(choose());
  running_block = nullptr;
}

bool Block::all(bool value) {
  dawdle();
  const bool result = arrive(barrier_, shape_.num_threads, value);
  dawdle();
  return result;
}

uint64_t Block::from_lane(int lanes, uint64_t value, uint32_t distance) {
  Thread& self = threads_[static_cast<size_t>(running_)];
  const int parity = self.parity[lanes];
  self.parity[lanes] ^= 1;
  self.values[lanes][parity] = value;
  arrive(lane_barriers_[lanes][static_cast<size_t>(running_ / lanes)], lanes, true);
  return threads_[static_cast<size_t>(running_) ^ distance].values[lanes][parity];
}

void Block::pause() {
  const int next = choose();
  if (next != running_) switch_to(next);
  if (++num_pauses_ < kQuickPauses) {
    sched_yield();
  } else {
    usleep(kPauseUs);
  }
}

void Block::dawdle() {
  if (num_naps_ < kMaxNaps && random_.below(32) == 0) {
    ++num_naps_;
    nap();
  }
  if (random_.below(4) == 0) switch_to(choose());
}

void Block::nap() {
  if (max_nap_us_ != 0) usleep(static_cast<useconds_t>(random_.below(max_nap_us_)));
}

bool Block::arrive(Barrier& barrier, int num_threads, bool value) {
  barrier.all_so_far = barrier.all_so_far && value;
  if (++barrier.num_arrived == num_threads) {
    barrier.result = barrier.all_so_far;
    barrier.all_so_far = true;
    barrier.num_arrived = 0;
    ++barrier.round;
    num_pauses_ = 0;
    for (Thread& thread : threads_) {
      if (thread.state == State::kAtBarrier && thread.barrier == &barrier) {
        thread.state = State::kReady;
      }
    }
  } else {
    Thread& self = threads_[static_cast<size_t>(running_)];
    self.state = State::kAtBarrier;
    self.barrier = &barrier;
    switch_to(choose());
  }
  return barrier.result;  // the next round cannot end before this thread arrives
}

int Block::choose() {
  const int first = static_cast<int>(random_.below(static_cast<uint64_t>(shape_.num_threads)));
  for (int i = 0; i < shape_.num_threads; ++i) {
    const int thread = (first + i) % shape_.num_threads;
    const State state = threads_[static_cast<size_t>(thread)].state;
    if (state == State::kNew || state == State::kReady) return thread;
  }
  return -1;
}

void Block::switch_to(int next) {
  if (next == running_) return;
  if (next < 0) {
    std::fprintf(stderr,
                 "simulated GPU: threads of block %d of %s wait at a barrier that the others have "
                 "passed by or never reach\n",
                 shape_.index, kernel_.c_str());
    std::abort();
  }
  if (_setjmp(threads_[static_cast<size_t>(running_)].context) == 0) enter(next);
}

void Block::enter(int next) {
  running_ = next;
  Thread& thread = threads_[static_cast<size_t>(next)];
  if (thread.state != State::kNew) _longjmp(thread.context, 1);
  thread.state = State::kReady;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &Block::start, 0);
  setcontext(&context);
  std::abort();  // not reached
}

void Block::start() {
  Block& block = current();
  (*block.body_)();
  block.finish();
}

void Block::finish() {
  threads_[static_cast<size_t>(running_)].state = State::kDone;
  if (++num_done_ == shape_.num_threads) _longjmp(outside_, 1);
  const int next = choose();
  if (next < 0) switch_to(next);
  enter(next);
}

}  // namespace simulated_gpu
