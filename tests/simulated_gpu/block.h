// A block of GPU threads on one thread of the host: they take turns, as fibers, and change at
// barriers and in waits, in a random order. So a block that waits costs next to nothing, and
// threads that meet at different barriers are found out. Blocks run beside each other, on threads
// of their own (kernels.cpp); what the threads of one block order among themselves, ThreadSanitizer
// checks in tests/cpp/, where each is a thread of the host.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpp/random.h"

namespace simulated_gpu {

// Neighbours that exchange values: a warp at most.
inline constexpr int kMostLanes = 32;
inline constexpr size_t kSharedDoubles = 256;

class Block {
 public:
  struct Shape {
    int index;
    int num_blocks;
    int local_rank;
    int num_threads;  // a multiple of kMostLanes
  };

  // kernel: its name, for messages. max_nap_us: 0 for none.
  Block(const Shape& shape, uint64_t seed, uint64_t max_nap_us, const std::string& kernel);
  ~Block();
  Block(const Block&) = delete;

  // Every thread of the block runs `body`. Returns when all are through.
  void run(const std::function<void()>& body);

  // The block whose code calls this.
  static Block& current();

  const Shape& shape() const { return shape_; }
  int thread() const { return running_; }

  // All threads call this: whether each of them says so.
  bool all(bool value);
  // What the thread `thread ^ distance` gives; kLanes neighbours call this together.
  uint64_t from_lane(int lanes, uint64_t value, uint32_t distance);
  double* shared_doubles() { return shared_doubles_; }

  // In a spinning wait: others' turn.
  void pause();
  // Now and then, where threads are free to come in any order.
  void dawdle();

 private:
  enum class State { kNew, kReady, kAtBarrier, kDone };
  struct Barrier {
    int num_arrived = 0;
    uint32_t round = 0;
    bool all_so_far = true;
    bool result = true;
  };
  struct Thread {
    State state = State::kNew;
    const Barrier* barrier = nullptr;
    jmp_buf context;
    std::byte* stack = nullptr;
    // By lanes; two, so that one barrier suffices between the same neighbours.
    uint64_t values[kMostLanes + 1][2] = {};
    int parity[kMostLanes + 1] = {};
  };

  bool arrive(Barrier& barrier, int num_threads, bool value);
  // The next thread that can go on; -1 if none can.
  int choose();
  void switch_to(int next);
  [[noreturn]] void enter(int next);
  [[noreturn]] void finish();
  static void start();
  void nap();

  const Shape shape_;
  rota::test::Random random_;
  const uint64_t max_nap_us_;
  const std::string& kernel_;
  const std::function<void()>* body_ = nullptr;

  std::vector<Thread> threads_;
  int running_ = 0;
  int num_done_ = 0;
  int num_naps_ = 0;
  uint32_t num_pauses_ = 0;  // since a barrier was passed
  jmp_buf outside_;
  Barrier barrier_;
  std::vector<Barrier> lane_barriers_[kMostLanes + 1];  // by lanes
  double shared_doubles_[kSharedDoubles];
};

}  // namespace simulated_gpu
