// Windows of ranks that are threads: puts that signals order and sums that locks make atomic, on
// one host and on several, and what ends a wait. tests/test_window.py has ranks that are processes.
#include "core/window.h"

#include <array>

#include "check.h"
#include "random.h"
#include "window_world.h"

namespace rota::test {
namespace {

// In each round every rank writes to every other, and reads once it has the writer's signal. A
// second channel says that the place is free again.
void signals_order_puts(std::string_view letters, int num_rounds) {
  constexpr int kWritten = 0, kRead = 1;
  constexpr size_t kLength = 40;
  using Numbers = std::array<int, kLength>;
  WindowWorld world(letters, sizeof(Numbers) * letters.size(), 2);
  const int world_size = world.world_size();
  world.run([&](WindowRank& self) {
    Random random(self.rank);
    for (int round = 0; round < num_rounds; ++round) {
      for (int peer = 0; peer < world_size; ++peer) {
        if (round > 0) self.window.wait_signal(peer, kRead, std::nullopt);
        Numbers numbers;
        numbers.fill(round * world_size + self.rank);
        self.window.put(peer, static_cast<uint64_t>(self.rank), numbers.data(), 1, sizeof(Numbers));
        dawdle(random);
        self.window.signal(peer, kWritten);
      }
      for (int peer = 0; peer < world_size; ++peer) {
        self.window.wait_signal(peer, kWritten, std::nullopt);
        Numbers numbers;
        self.window.get(self.rank, static_cast<uint64_t>(peer), numbers.data(), 1, sizeof(Numbers));
        for (const int number : numbers) check_equal(number, round * world_size + peer, "number");
        self.window.signal(peer, kRead);
      }
    }
  });
}

void any_signal_is_taken_once() {
  constexpr int kWorldSize = 4, kNumRequests = 100;
  WindowWorld world("aaaa", sizeof(uint64_t) * kWorldSize);
  world.run([&](WindowRank& self) {
    const int rank = self.rank;
    Window& window = self.window;
    Random random(rank);
    if (rank != 0) {
      for (uint64_t i = 1; i <= kNumRequests; ++i) {
        window.put(0, static_cast<uint64_t>(rank), &i, 1, sizeof(i));
        dawdle(random);
        window.signal(0, 0);
        window.wait_signal(0, 0, std::nullopt);
      }
      return;
    }
    constexpr std::array kClients{1, 2, 3};
    std::array<uint64_t, kWorldSize> num_requests{};
    for (int i = 0; i < 3 * kNumRequests; ++i) {
      const int client = window.wait_any_signal(kClients, 0, std::nullopt);
      const auto index = static_cast<size_t>(client);
      uint64_t request;
      window.get(0, index, &request, 1, sizeof(request));
      check_equal(request, ++num_requests[index], "request");
      dawdle(random);
      window.signal(client, 0);
    }
    for (const int client : kClients) {
      check_equal(window.num_signals(client, 0), 0, "signals that nobody took");
    }
  });
}

// Every rank adds to ranges of rank 0's window that overlap and cross chunks.
template <typename T>
void sums_are_atomic(std::string_view letters, DType dtype, int num_rounds,
                     const std::optional<WireFormat>& wire) {
  constexpr uint64_t kChunk = kWindowChunkBytes / sizeof(T);
  constexpr uint64_t kNumElems = 2 * kChunk + 100;
  WindowWorld world(letters, kNumElems * sizeof(T), 1, dtype);
  world.run([&](WindowRank& self) {
    const auto offset = static_cast<uint64_t>(10 * self.rank);
    const std::vector<T> ones(kChunk + 50, 1);
    for (int round = 0; round < num_rounds; ++round) {
      self.window.accumulate(0, offset, ones.data(), dtype, ones.size(), wire);
    }
    self.window.signal(0, 0);
    if (self.rank != 0) return;
    std::vector<T> expected(kNumElems);
    for (int peer = 0; peer < world.world_size(); ++peer) {
      self.window.wait_signal(peer, 0, std::nullopt);
      for (uint64_t i = 0; i < ones.size(); ++i) {
        expected[static_cast<uint64_t>(10 * peer) + i] += static_cast<T>(num_rounds);
      }
    }
    check(std::equal(expected.begin(), expected.end(), world.data<T>(0)), "the sums");
  });
}

// As left by a rank that was killed while it added.
void lock_of_a_lost_rank_is_an_error() {
  WindowWorld world("aaa", 64);
  Flag& lock = world.control(0).locks[0];
  check(lock.try_change(0, 2), "held by rank 1");
  world.control(1).closed.publish(1);
  const int number = 1;
  const auto add = [&](Window& window) {
    window.accumulate(0, 0, &number, DType::kInt32, 1, std::nullopt);
  };
  expect_error(ErrorKind::kPeerFailed, [&] { add(*world.window(2)); },
               {"rank 1, which adds to the same chunk"});
  check_equal(*world.data<int>(0), 0, "the sum");
}

const CaseTable kCases{
    {"window_signals-ws2", signals_order_puts, "aa", 200},
    {"window_signals-ws4", signals_order_puts, "aaaa", 200},
    {"remote_window_signals", signals_order_puts, "aabb", 20},
    {"window_any_signal-ws4", any_signal_is_taken_once},
    {"window_sums-float32", sums_are_atomic<float>, "aaaa", DType::kFloat32, 30, std::nullopt},
    {"window_sums-int64", sums_are_atomic<int64_t>, "aaaa", DType::kInt64, 30, std::nullopt},
    {"remote_window_sums", sums_are_atomic<float>, "aabb", DType::kFloat32, 4, std::nullopt},
    {"remote_window_sums-float16", sums_are_atomic<float>, "aabb", DType::kFloat32, 4,
     WireFormat{DType::kFloat16}},
    {"window_lost_lock", lock_of_a_lost_rank_is_an_error},
};

}  // namespace
}  // namespace rota::test
