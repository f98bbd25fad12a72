// A rank on another host, for windows: asks it, and serves what it asks. A thread takes in what it
// sends, and neither takes part in collectives nor calls Python. The failure of one rank ends
// nothing of another, so each has a thread of its own: a recv from any rank would stay with the one
// whose message began first, if its host vanishes then, and so would all behind it
// (tests/test_gloo_waits.py).
//
// Requests are numbered from 1 on, served and answered in their order, and at most kMaxAsked of
// them are without an answer. So an answer proves that its request has been sent, and request n
// that answer n - kMaxAsked has: their buffers are free then. No message is given up before, since
// an engine such as Gloo would then stop the whole connection.
//
// A rank that owes an answer and from which nothing comes for long is lost. One that owes none is
// asked for a sign of life while somebody waits for it. Signs need no connections of their own: a
// queue of data that delays them is itself a row of packets, each a sign. So that these come often,
// packets are short where answers are late: no longer than a link moves in a moment.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/flag.h"
#include "base/fork_safe.h"
#include "base/waiter.h"
#include "core/window.h"
#include "hosts/connections.h"
#include "hosts/silence.h"
#include "hosts/window_packet.h"

namespace rota::hosts {

class WindowPeer {
 public:
  // A request as it is served, in the peer's thread.
  struct Request {
    WindowPeer& peer;
    const WindowPacket& packet;
    std::span<const std::byte> data;
    std::byte* answer_data;  // of a get: where its answer's data goes, at most kPacketDataBytes
    // Whoever serves it sets these, which are kept until the answer is on its way: whoever needs
    // the lock for itself may then tell the peer something that is not to overtake the answer.
    std::shared_ptr<void> owner{};               // of the lock's mutex
    std::shared_lock<std::shared_mutex> lock{};  // goes first
  };
  // Returns the bytes of its answer's data. Throws RemoteFailure, which the peer gets.
  using Serve = std::function<size_t(Request&)>;

  // Requests of one call, cut into packets of which several are on their way.
  class Call {
   public:
    Call(WindowPeer& peer, WaitObserver& observer) : peer_(peer), observer_(observer) {}
    // Answers that still come are dropped.
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Sends a request once there is room. write_data, if any, writes its packet.data_bytes; the
    // data of the answer goes to `result`. Throws RemoteFailure of earlier requests.
    void ask(WindowPacket packet, const std::function<void(std::byte*)>& write_data = nullptr,
             std::span<std::byte> result = {});
    // Waits until all are answered. Throws RemoteFailure.
    void finish();
    // How much data the next request, or its answer, should have.
    size_t packet_bytes() const;

   private:
    friend class WindowPeer;
    void throw_failure();

    WindowPeer& peer_;
    WaitObserver& observer_;
    uint64_t last_ = 0;                     // number of its last request
    std::optional<RemoteFailure> failure_;  // guarded by the peer's mutex
  };

  // name: "rank 3 on host 1", for errors.
  WindowPeer(Connections& connections, int rank, int tag, std::string name, Serve serve);
  // Ends the thread; what is on its way may get lost.
  ~WindowPeer();

  const std::string& name() const { return name_; }
  // Asks without waiting for the answer, if there is room.
  void try_ask(const WindowPacket& packet);
  // Tells the peer that what it asks takes long. For its thread.
  void send_busy();
  // Whether all requests are answered, or the peer is lost.
  bool is_quiet();
  bool is_lost();
  // What has happened to it; see RemoteRanks.
  std::optional<std::string> loss();

 private:
  using Clock = std::chrono::steady_clock;
  using MessageRef = Connections::MessageRef;

  static constexpr uint64_t kMaxAsked = 4;
  static constexpr size_t kNumPosted = 4;  // recvs that wait for packets

  // What is kept of a request without an answer.
  struct Asked {
    PacketBuffer buffer;
    MessageRef sent;
    Clock::time_point since;
    Call* call = nullptr;  // null: nobody waits for it any more
    std::span<std::byte> result;
  };
  struct Answer {
    PacketBuffer buffer;
    MessageRef sent;
    std::vector<MessageRef> sent_busy;
  };

  void run();
  bool await_packet(size_t posted);  // false: the thread ends
  void take(PacketBuffer& packet);
  void take_answer(PacketBuffer& packet);
  void serve(PacketBuffer& packet);
  // Guarded by the mutex, as what they change.
  bool has_room() const { return num_asked_ - num_answered_.load() < kMaxAsked; }
  void send(WindowPacket packet, const std::function<void(std::byte*)>& write_data,
            std::span<std::byte> result, Call* call);
  void send_or_lose(const WindowPacket& packet);
  void lose(const std::string& why);
  // Once an answer has taken so long.
  void fit_packets(uint64_t number, Clock::duration passed);

  Connections& connections_;
  const int rank_;
  const int tag_;
  const std::string name_;
  const Serve serve_;

  // Private to this process: the thread publishes, callers wait.
  Flag num_answered_{};
  Flag sleeping_{};
  Flag num_heard_{};  // packets
  Waiter waiter_;
  Waiter publisher_;

  std::mutex mutex_;
  // Guarded by it.
  std::array<Asked, kMaxAsked> asked_;  // by number
  uint64_t num_asked_ = 0;
  size_t packet_bytes_ = kLeastPacketDataBytes;
  uint64_t num_asked_of_other_length_ = 0;  // before packet_bytes_ changed
  std::optional<std::string> loss_;
  Silence silence_;
  uint64_t num_heard_then_ = 0;  // at the last look
  MessageRef awaited_;           // by the thread
  bool is_ending_ = false;

  // The thread's own.
  std::array<PacketBuffer, kNumPosted> received_;
  std::array<MessageRef, kNumPosted> posted_;
  std::array<Answer, kMaxAsked> answers_;  // by number
  uint64_t num_served_ = 0;
  PacketBuffer busy_;  // always the same
  size_t busy_bytes_ = 0;

  ForkSafe<std::thread> thread_;
};

}  // namespace rota::hosts
