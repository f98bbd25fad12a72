// Watches over a group on several hosts while its threads wait for messages, which know nothing of
// failures elsewhere. One thread sends signs of life, so that a host that vanishes without a word
// is noticed within 2 s, looks for failures among this host's ranks, carries the reason of any
// failure to the other hosts, and tells the user for whom a wait has lasted long. The other takes
// the letters of other hosts.
//
// Each rank sends to those ranks of other hosts whose partner it is (schedule/hosts.h), and hears
// from its own partners, one on each other host.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fork_safe.h"
#include "core/communicator.h"
#include "core/watch.h"
#include "hosts/engine.h"
#include "hosts/inbox.h"
#include "hosts/letters.h"
#include "schedule/hosts.h"

namespace rota::hosts {

class HostMonitor {
 public:
  // fail(error): runs in a thread of this, when another rank has failed. after_failure(): likewise,
  // once this rank has failed and has told the other hosts.
  HostMonitor(Engine& engine, Inbox& inbox, const schedule::Hosts& hosts, Communicator& local,
              int rank, std::function<std::string(int)> describe,
              std::function<void(const Error&)> fail, std::function<void()> after_failure);
  // Tells the other hosts that this rank has left, unless it has failed.
  ~HostMonitor();
  HostMonitor(const HostMonitor&) = delete;
  HostMonitor& operator=(const HostMonitor&) = delete;

  // From now on all ranks have one of these: who gives no sign of life is lost.
  void expect_signs();
  // Tells the other hosts that this rank has failed, and returns at once. From any thread.
  void announce(const Error& error);

 private:
  using Clock = std::chrono::steady_clock;

  // One that is being sent.
  struct Sent {
    std::unique_ptr<Letter> letter;
    Engine::Transfer transfer;
  };
  // A rank that this one hears from.
  struct Heard {
    std::chrono::milliseconds silent_for{0};
    bool has_left = false;
  };

  void listen();
  void watch();
  void take(int sender, const Letter& letter);
  void send(const Letter& letter, std::chrono::milliseconds patience);
  void count_silence(std::chrono::milliseconds passed);
  void warn_about_stall();
  // The start of a message.
  std::string prefix() const;

  Engine& engine_;
  Inbox& inbox_;
  const schedule::Hosts& hosts_;
  int rank_;
  std::function<std::string(int)> describe_;
  std::function<void(const Error&)> fail_;
  std::function<void()> after_failure_;
  Watch local_watch_;                          // the watching thread's own
  std::vector<int> receivers_;                 // of this rank's signs
  std::chrono::milliseconds longest_silence_;  // before a rank counts as lost
  std::deque<Sent> sent_;                      // of the watching thread
  Clock::time_point warned_of_{};              // the wait that the user knows of

  std::mutex mutex_;
  // Guarded by it.
  std::unordered_map<int, Heard> heard_;  // by rank
  std::optional<Error> to_announce_;
  bool expects_signs_ = false;
  bool has_failed_ = false;
  bool is_ending_ = false;

  ForkSafe<std::condition_variable> woken_;
  ForkSafe<std::thread> listening_;
  ForkSafe<std::thread> watching_;
};

}  // namespace rota::hosts
