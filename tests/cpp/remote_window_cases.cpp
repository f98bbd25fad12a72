// Windows between hosts, of ranks that are threads, over a network in memory: long transfers, what
// is refused, and ranks that are busy. window_cases.cpp has what is the same on one host.
#include "hosts/remote_window.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "check.h"
#include "hosts/connections.h"
#include "random.h"
#include "window_world.h"

namespace rota::test {
namespace {

using hosts::PacketBuffer;
using hosts::RemoteWindow;
using hosts::WindowPacket;
using hosts::WindowService;
using std::chrono::milliseconds;

// Transfers take many packets, in both directions at once, at odd places.
void long_transfers() {
  constexpr size_t kNumBytes = 11 * hosts::kPacketDataBytes + 13;
  constexpr uint64_t kOffset = 5;
  WindowWorld world("ab", kNumBytes + kOffset);
  world.run([&](WindowRank& self) {
    const int peer = 1 - self.rank;
    std::vector<std::byte> sent(kNumBytes), got(kNumBytes);
    for (size_t i = 0; i < kNumBytes; ++i) {
      sent[i] = static_cast<std::byte>(mix(i + static_cast<size_t>(self.rank) * kNumBytes));
    }
    self.window.put(peer, kOffset, sent.data(), kNumBytes, 1);
    self.window.signal(peer, 0);
    self.window.get(peer, kOffset, got.data(), kNumBytes, 1);
    check(got == sent, "what was put there");
    self.window.wait_signal(peer, 0, std::nullopt);
    check_equal(*world.data<char>(self.rank), char{0}, "what lies before");
    world.rendezvous();  // the peer still reads
  });
}

// A packet from rank 1 as another build might send it, and the answer.
class RawPeer {
 public:
  explicit RawPeer(MemoryNetwork& network) : connections_(network.connect(1)) {}

  WindowPacket ask(WindowPacket packet, bool is_cut_short = false) {
    packet.number = ++number_;
    packet.window = kWindowNumber;
    return exchange(packet, is_cut_short).value();
  }
  // None if there is no answer for a moment.
  std::optional<WindowPacket> exchange(const WindowPacket& packet, bool is_cut_short) {
    sent_.header() = packet;
    std::memset(sent_.data(), 1, hosts::kPacketDataBytes);
    const size_t num_bytes = sent_.seal() - (is_cut_short ? 12 : 0);
    const auto recv = connections_->recv(answer_.message(), PacketBuffer::kNumBytes, 0, kTag);
    const auto send = connections_->send(sent_.message(), num_bytes, 0, kTag);
    send->wait(kPatience);
    try {
      recv->wait(is_cut_short ? milliseconds(100) : milliseconds(kPatience));
    } catch (const std::runtime_error&) {
      return std::nullopt;
    }
    return answer_.header();
  }

 private:
  static constexpr int kTag = hosts::kFirstWindowTag;
  hosts::ConnectionsPtr connections_;
  PacketBuffer sent_, answer_;
  uint64_t number_ = 0;
};

void malformed_requests_write_nothing() {
  constexpr size_t kNumBytes = 100;
  using Kind = WindowPacket::Kind;
  constexpr auto kFloat = static_cast<uint32_t>(DType::kFloat32);
  const auto with_wire = [](uint32_t dtype, uint32_t is_block_scaled) {
    return WindowPacket{.kind = Kind::kAccumulate,
                        .num = 2,
                        .data_bytes = 4,
                        .dtype = kFloat,
                        .wire_dtype = dtype,
                        .has_wire = 1,
                        .is_block_scaled = is_block_scaled};
  };
  const std::vector<WindowPacket> requests{
      {.kind = Kind::kPut, .first = 90, .num = 11, .data_bytes = 11},
      {.kind = Kind::kPut, .first = ~uint64_t{0} - 4, .num = 8, .data_bytes = 8},
      {.kind = Kind::kPut, .first = 0, .num = 50, .data_bytes = 8},
      {.kind = Kind::kGet, .first = 1, .num = 100},
      {.kind = Kind::kGet, .first = 0, .num = ~uint64_t{0}},
      {.kind = Kind::kAccumulate, .first = 24, .num = 2, .data_bytes = 8, .dtype = kFloat},
      {.kind = Kind::kAccumulate, .num = ~uint64_t{0} / 2, .data_bytes = 8, .dtype = kFloat},
      {.kind = Kind::kAccumulate, .num = 2, .data_bytes = 7, .dtype = kFloat},
      {.kind = Kind::kAccumulate, .num = 1, .data_bytes = 8, .dtype = 1},
      with_wire(99, 0),
      with_wire(static_cast<uint32_t>(DType::kInt16), 0),
      with_wire(static_cast<uint32_t>(DType::kBFloat16), 1),
      {.kind = Kind::kSignal, .channel = 1},
      {.kind = Kind::kSignal, .channel = ~0u},
  };
  WindowWorld world("ab", kNumBytes);
  const schedule::Hosts hosts = hosts_of("ab");
  WindowService service(world.network().connect(0), hosts, 0, 0);
  RankWindow remote{.view = {.data = {static_cast<std::byte*>(nullptr), kNumBytes}},
                    .is_remote = true};
  RankWindow own{.view = {&world.control(0), 2, {world.data<std::byte>(0), kNumBytes}}};
  const auto served = std::make_shared<RemoteWindow>(service, kWindowNumber, DType::kFloat32);
  Window window(0, {own, remote}, 1, {.timeout = kPatience, .check_interrupt = [] {}}, served);
  served->open(served, window);

  RawPeer peer(world.network());
  for (size_t i = 0; i < requests.size(); ++i) {
    const WindowPacket answer = peer.ask(requests[i]);
    check(answer.kind == Kind::kFailed, join("request ", i, " is refused"));
  }
  check(peer.ask({.kind = Kind::kPut, .first = 96, .num = 4, .data_bytes = 4}).kind == Kind::kDone,
        "a right one is served");
  // The peer is given up, since nobody knows what it sends.
  WindowPacket cut{.kind = Kind::kPut,
                   .number = requests.size() + 2,
                   .window = kWindowNumber,
                   .num = 8,
                   .data_bytes = 8};
  check(!peer.exchange(cut, true), "one that is cut short is not answered");
  while (service.is_usable()) usleep(1000);
  const std::byte* data = world.data<std::byte>(0);
  check(std::all_of(data, data + 96, [](std::byte byte) { return byte == std::byte{0}; }),
        "nothing else was written");
  check_equal(window.num_signals(1, 0), 0, "signals");
  served->close();
}

// A rank of the target's host holds a chunk for longer than a host may be silent. Then it dies, as
// its window tells.
void busy_target_is_not_lost() {
  setenv("ROTA_HOST_SILENCE_MS", "500", 1);
  WindowWorld world("abb", 64, 1, DType::kInt32);
  world.run([&](WindowRank& self) {
    if (self.rank == 2) check(world.control(1).locks[0].try_change(0, 3), "held by rank 2");
    world.rendezvous();
    const int number = 1;
    if (self.rank == 2) {
      usleep(1'200'000);
      world.control(2).closed.publish(1);
    } else if (self.rank == 0) {
      expect_error(ErrorKind::kPeerFailed,
                   [&] { self.window.accumulate(1, 0, &number, DType::kInt32, 1, std::nullopt); },
                   {"rank 2, which adds to the same chunk"});
      self.window.put(1, 1, &number, 1, sizeof(number));
      check_equal(world.data<int>(1)[0], 0, "the sum");
    }
  });
}

class Interruption final : public WaitObserver {
 public:
  explicit Interruption(int num_ticks) : num_ticks_(num_ticks) {}
  std::optional<Error> poll() override { return std::nullopt; }
  std::optional<Error> tick(Nanoseconds) override {
    if (num_ticks_-- > 0) return std::nullopt;
    return Error(ErrorKind::kInternal, "interrupted");
  }

 private:
  int num_ticks_;
};

// The caller's memory is free at once, though answers are on their way; later calls are not
// disturbed by them.
void interrupted_call_leaves_nothing_behind() {
  constexpr size_t kNumBytes = 30 * hosts::kPacketDataBytes;
  WindowWorld world("ab", kNumBytes);
  world.run([&](WindowRank& self) {
    if (self.rank == 1) return;
    std::vector<std::byte> memory(kNumBytes);
    for (int i = 0; i < 8; ++i) {
      Interruption get(i), put(i);
      expect_error(ErrorKind::kInternal, [&] { self.remote->get(1, 0, memory, get); });
      std::ranges::fill(memory, std::byte{1});
      expect_error(ErrorKind::kInternal, [&] { self.remote->put(1, 0, memory, put); });
      std::ranges::fill(memory, std::byte{2});
      const int sent = i + 1;
      int got = 0;
      self.window.put(1, 0, &sent, 1, sizeof(sent));
      self.window.get(1, 0, &got, 1, sizeof(got));
      check_equal(got, sent, "what was put there");
      check(std::ranges::count(memory, std::byte{2}) == kNumBytes, "the caller's memory");
    }
  });
}

const CaseTable kCases{
    {"remote_window_long", long_transfers},
    {"remote_window_malformed", malformed_requests_write_nothing},
    {"remote_window_busy", busy_target_is_not_lost},
    {"remote_window_interrupted", interrupted_call_leaves_nothing_behind},
};

}  // namespace
}  // namespace rota::test
