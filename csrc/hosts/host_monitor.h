// Watches over a group on several hosts while its threads wait for messages, which know nothing of
// failures elsewhere. One thread sends signs of life, so that a host that vanishes without a word
// is noticed within 2 s, looks for failures among this host's ranks, and for recvs that have
// waited too long, carries the reason of any failure to the other hosts, and tells the user for
// whom a wait has lasted long. The other takes the letters of other hosts.
//
// A rank may end without a word once it has done its part of its last call, while others are still
// in that call. So the news of a death says which call that was, and each rank fails only where it
// needs the dead one: in a later call, or in a wait outside calls. A rank that does neither goes
// on.
//
// Each rank sends to those ranks of other hosts whose partner it is (schedule/hosts.h), and hears
// from its own partners, one on each other host.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
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
#include "hosts/letters.h"
#include "hosts/silence.h"
#include "schedule/hosts.h"

namespace rota::hosts {

class Bridge;

class HostMonitor {
 public:
  // Calls the bridge, which owns it, in threads of its own.
  explicit HostMonitor(Bridge& bridge);
  // Tells the other hosts that this rank has left, unless it has failed.
  ~HostMonitor();

  // From now on all ranks have one of these: who gives no sign of life is lost.
  void expect_signs();
  // This rank is in the call of that number, counted from 1, until it has done its part of it.
  void begin_call(uint64_t number) { call_.store(number); }
  void end_call();
  // A rank that this one needs, and that is dead or silent; as far as this rank has heard.
  std::optional<Error> find_loss();
  // As Communicator::ended_ranks(), of all hosts; those that give no sign of life count.
  std::map<int, std::string> ended_ranks();
  // Tells the other hosts that this rank has failed, and returns at once. From any thread.
  void post_failure(const Error& error);

 private:
  using Clock = std::chrono::steady_clock;

  // One that is being sent.
  struct Sent {
    std::unique_ptr<Letter> letter;
    Engine::Transfer transfer;
  };
  // A rank that this one hears from.
  struct Heard {
    Silence silence;
    bool has_left = false;
    uint64_t completed = 0;  // the last call of which it has said that it is done
  };
  // One that has ended without leaving the group.
  struct Dead {
    std::string name;
    uint64_t completed = 0;  // the last call that it has done its part of
  };

  void listen();
  void watch();
  void take(int sender, const Letter& letter);
  void send(const Letter& letter, std::chrono::milliseconds patience);
  void look_for_deaths();
  void look_for_silence();
  // A recv whose message has not come in time.
  std::optional<Error> find_overdue() const;
  Error lost(std::string_view what, std::string_view advice) const;
  void warn_about_stall();
  // The start of a message.
  std::string prefix() const;

  Bridge& bridge_;
  Engine& engine_;
  const schedule::Hosts& hosts_;
  std::atomic<uint64_t> call_{0};       // in which this rank is; 0: in none
  std::atomic<uint64_t> completed_{0};  // the last one that it has done its part of
  Watch local_watch_;                   // the watching thread's own
  std::vector<int> receivers_;          // of this rank's letters, for the watching thread
  std::deque<Sent> sent_;               // of the watching thread
  Clock::time_point warned_of_{};       // the wait that the user knows of

  std::mutex mutex_;
  // Guarded by it.
  std::unordered_map<int, Heard> heard_;  // by rank
  std::unordered_map<int, Dead> dead_;    // by rank
  std::optional<Error> to_post_;
  bool expects_signs_ = false;
  bool has_failed_ = false;
  bool is_ending_ = false;

  ForkSafe<std::condition_variable> woken_;
  ForkSafe<std::thread> listening_;
  ForkSafe<std::thread> watching_;
};

}  // namespace rota::hosts
