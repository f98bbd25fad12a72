// Windows of ranks that are threads: puts that signals order and sums that locks make atomic, on
// one host and on several, and what ends a wait. tests/test_window.py has ranks that are processes.
#include "core/window.h"

#include <array>

#include "check.h"
#include "cpu/element_loops.h"
#include "random.h"
#include "window_world.h"

namespace rota::test {
namespace {

const std::vector<std::string> kOneHost{"a", "a", "a", "a"};
const std::vector<std::string> kTwoByTwo{"a", "a", "b", "b"};

// In each round every rank writes to every other, and reads once it has the writer's signal. A
// second channel says that the place is free again.
void signals_order_puts(std::vector<std::string> host_of, int num_rounds) {
  constexpr int kWritten = 0, kRead = 1;
  constexpr size_t kLength = 40;
  using Numbers = std::array<int, kLength>;
  WindowWorld world(host_of, sizeof(Numbers) * host_of.size(), 2);
  const int world_size = world.world_size();
  world.run([&](WindowRank& self) {
    Random random(static_cast<uint64_t>(self.rank));
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

// Rank 0 serves whoever comes; every signal is taken once.
void any_signal_is_taken_once() {
  constexpr int kWorldSize = 4, kNumRequests = 100;
  WindowWorld world(kWorldSize, sizeof(uint64_t) * kWorldSize);
  world.run([&](WindowRank& self) {
    const int rank = self.rank;
    Window* const window = &self.window;
    Random random(static_cast<uint64_t>(rank));
    if (rank != 0) {
      for (uint64_t i = 1; i <= kNumRequests; ++i) {
        window->put(0, static_cast<uint64_t>(rank), &i, 1, sizeof(i));
        dawdle(random);
        window->signal(0, 0);
        window->wait_signal(0, 0, std::nullopt);
      }
      return;
    }
    constexpr std::array kClients{1, 2, 3};
    std::array<uint64_t, kWorldSize> num_requests{};
    for (int i = 0; i < 3 * kNumRequests; ++i) {
      const int client = window->wait_any_signal(kClients, 0, std::nullopt);
      const auto index = static_cast<size_t>(client);
      uint64_t request;
      window->get(0, index, &request, 1, sizeof(request));
      check_equal(request, ++num_requests[index], "request");
      dawdle(random);
      window->signal(client, 0);
    }
    for (const int client : kClients) {
      check_equal(window->num_signals(client, 0), uint64_t{0}, "signals that nobody took");
    }
  });
}

// Every rank adds to ranges of rank 0's window that overlap and cross chunks.
template <typename T>
void sums_are_atomic(std::vector<std::string> host_of, DType dtype, int num_rounds,
                     const std::optional<WireFormat>& wire = std::nullopt) {
  constexpr uint64_t kChunk = kWindowChunkBytes / sizeof(T);
  constexpr uint64_t kNumElems = 2 * kChunk + 100;
  WindowWorld world(host_of, kNumElems * sizeof(T), 1, dtype);
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

// Rounded once, in blocks that start with the contribution, wherever chunks end.
void contributions_are_rounded_to_the_wire() {
  constexpr uint64_t kOffset = 7, kNumElems = 40'000;
  std::vector<float> values(kNumElems);
  for (uint64_t i = 0; i < kNumElems; ++i) {
    values[i] = static_cast<float>(i) * 0.37f - 1000;
  }
  for (const WireFormat wire : {WireFormat{DType::kBFloat16}, WireFormat{DType::kFloat16, true},
                                WireFormat{DType::kFloat8E4M3, true}}) {
    WindowWorld world(1, (kOffset + kNumElems) * sizeof(float));
    const auto window = world.window(0);
    window->accumulate(0, kOffset, values.data(), DType::kFloat32, kNumElems, wire);
    std::vector<std::byte> bytes(wire.num_bytes(kNumElems));
    const WirePlace place = wire.place(bytes.data(), kNumElems);
    const cpu::WireLoops& loops = cpu::element_loops().wire(wire);
    loops.encode(values.data(), place, kNumElems, 1);
    std::vector<float> expected(kNumElems);
    loops.decode_sum({.srcs = &place, .num = 1}, expected.data(), kNumElems, 1);
    const float* sums = world.data<float>(0);
    check(std::equal(expected.begin(), expected.end(), sums + kOffset), "the rounded sums");
    check(std::all_of(sums, sums + kOffset, [](float sum) { return sum == 0; }), "those before");
  }
}

void wrong_arguments_are_refused() {
  WindowWorld world(2, 100, 3);
  const auto window = world.window(0);
  std::array<std::byte, 200> bytes{};
  const auto refusal = [](auto&& body) {
    return std::string(expect_error(ErrorKind::kValue, body).what());
  };
  check_contains(refusal([&] { window->put(2, 0, bytes.data(), 1, 1); }),
                 "rota.Window.put: rank 0/2: the rank is 2, expected 0 to 1");
  check_contains(refusal([&] { window->get(-1, 0, bytes.data(), 1, 1); }), "the rank is -1");
  check_contains(refusal([&] { window->put(1, 90, bytes.data(), 11, 1); }),
                 "elements 90 to 101 of rank 1's window, which has 100");
  check_contains(refusal([&] { window->get(1, ~uint64_t{0} / 4 + 2, bytes.data(), 2, 4); }),
                 "rank 1's");
  check_contains(
      refusal([&] { window->accumulate(1, 20, bytes.data(), DType::kInt32, 6, std::nullopt); }),
      "elements 20 to 26 of rank 1's window, which has 25");
  check_contains(refusal([&] { window->signal(1, 3); }), "the channel is 3, expected 0 to 2");
  check_contains(refusal([&] { window->wait_any_signal({}, 0, std::nullopt); }), "0 ranks");
  window->put(1, 100, bytes.data(), 0, 1);
  check_equal(window->num_signals(1, 0), uint64_t{0}, "signals");
}

void waits_end_at_their_timeout() {
  using std::chrono::milliseconds;
  WindowWorld world(2, 64);
  const auto window = world.window(0, {.timeout = milliseconds(20)});
  const Error error =
      expect_error(ErrorKind::kTimeout, [&] { window->wait_signal(1, 0, std::nullopt); });
  check_contains(error.what(), "rota.Window.wait_signal: rank 0/2 waited ");
  check_contains(error.what(), " ms for rank 1, a signal on channel 0; is it alive?");
  expect_error(ErrorKind::kTimeout, [&] { window->wait_signal(1, 0, milliseconds(5)); });
  world.window(1)->signal(0, 0);
  window->wait_signal(1, 0, std::nullopt);  // the waits that failed have taken none

  struct Interrupt {};
  WindowWorld other(2, 64);
  const auto interrupted = other.window(0, {.check_interrupt = [] { throw Interrupt(); }});
  try {
    interrupted->wait_signal(1, 0, std::nullopt);
    fail("the wait was not interrupted");
  } catch (const Interrupt&) {
  }
}

void closed_windows_are_refused() {
  WindowWorld world(3, 64);
  const auto window = world.window(0);
  world.window(1)->signal(0, 0);
  world.control(1).closed.publish(1);
  int number = 0;
  const auto refusal = [](auto&& body) {
    return std::string(expect_error(ErrorKind::kPeerFailed, body).what());
  };
  check_contains(refusal([&] { window->put(1, 0, &number, 1, sizeof(number)); }),
                 "rota.Window.put: rank 0/3: rank 1 has closed its window");
  refusal([&] { window->get(1, 0, &number, 1, sizeof(number)); });
  refusal([&] { window->accumulate(1, 0, &number, DType::kInt32, 1, std::nullopt); });
  refusal([&] { window->signal(1, 0); });
  refusal([&] { window->view(1); });
  check(!window->is_alive(1) && window->is_alive(2), "who is alive");
  window->wait_signal(1, 0, std::nullopt);  // which it had sent before
  check_contains(refusal([&] { window->wait_signal(1, 0, std::nullopt); }),
                 "waits in vain for rank 1, a signal on channel 0");
  world.window(2)->signal(0, 0);
  constexpr std::array kBoth{1, 2};
  check_equal(window->wait_any_signal(kBoth, 0, std::nullopt), 2, "the one that is left");
}

// As left by a rank that was killed while it added.
void lock_of_a_lost_rank_is_an_error() {
  WindowWorld world(3, 64);
  Flag& lock = world.control(0).locks[0];
  check(lock.try_change(0, 2), "held by rank 1");
  world.control(1).closed.publish(1);
  const int number = 1;
  const auto add = [&](Window& window) {
    window.accumulate(0, 0, &number, DType::kInt32, 1, std::nullopt);
  };
  const Error error = expect_error(ErrorKind::kPeerFailed, [&] { add(*world.window(2)); });
  check_contains(error.what(), "rank 1, which adds to the same chunk");
  check_equal(*world.data<int>(0), 0, "the sum");
}

const CaseTable kCases{
    {"window_signals-ws2", [] { signals_order_puts({"a", "a"}, 200); }},
    {"window_signals-ws4", [] { signals_order_puts(kOneHost, 200); }},
    {"remote_window_signals", [] { signals_order_puts(kTwoByTwo, 20); }},
    {"window_any_signal-ws4", any_signal_is_taken_once},
    {"window_sums-float32", [] { sums_are_atomic<float>(kOneHost, DType::kFloat32, 30); }},
    {"window_sums-int64", [] { sums_are_atomic<int64_t>(kOneHost, DType::kInt64, 30); }},
    {"remote_window_sums", [] { sums_are_atomic<float>(kTwoByTwo, DType::kFloat32, 4); }},
    {"remote_window_sums-float16",
     [] { sums_are_atomic<float>(kTwoByTwo, DType::kFloat32, 4, WireFormat{DType::kFloat16}); }},
    {"window_wire", contributions_are_rounded_to_the_wire},
    {"window_arguments", wrong_arguments_are_refused},
    {"window_timeout", waits_end_at_their_timeout},
    {"window_closed", closed_windows_are_refused},
    {"window_lost_lock", lock_of_a_lost_rank_is_an_error},
};

}  // namespace
}  // namespace rota::test
