// A group of ranks on several hosts: runs one collective at a time, compares the ranks' calls
// across hosts, and turns any failure into an error on every rank, as core/communicator.h does on
// one host. What collectives do is in hierarchical_sum.cpp and hierarchical_copies.cpp.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/communicator.h"
#include "hosts/engine.h"
#include "hosts/host_monitor.h"
#include "hosts/inbox.h"
#include "schedule/hosts.h"

namespace rota::hosts {

class Bridge {
 public:
  // local: the ranks of this host. data, letters: of all ranks, as in Engine.
  Bridge(schedule::Hosts hosts, int rank, std::shared_ptr<Communicator> local, ConnectionsPtr data,
         ConnectionsPtr letters);
  // To be called when all ranks have made theirs: from now on a silent host is a lost one.
  void expect_signs() { monitor_.expect_signs(); }
  std::map<int, std::string> ended_ranks() { return monitor_.ended_ranks(); }
  // Leaves the group.
  ~Bridge();

  const schedule::Hosts& hosts() const { return hosts_; }
  int rank() const { return rank_; }
  int world_size() const { return hosts_.world_size(); }
  int host() const { return hosts_.place_of(rank_).host; }
  int local_rank() const { return hosts_.place_of(rank_).local_rank; }
  int local_size() const { return hosts_.local_size(host()); }
  Communicator& local() { return *local_; }
  Inbox& inbox() { return inbox_; }
  // The ranks of other hosts whose partner this rank is.
  const std::vector<int>& partnered() const { return partnered_; }

  // A sum of which a host's leader, its first rank, sends no more than this to all other hosts
  // together. It travels with the greetings.
  static constexpr size_t kMaxShortBytes = 32 << 10;
  struct ShortSum {
    // Runs on every rank, once those of its host agree; what a leader returns is sent.
    std::function<std::span<const std::byte>()> contribute;
    // Runs on the leaders, once all contributions are there; writes short_result().
    std::function<void()> sum;
    size_t result_bytes = 0;
  };

  // Runs body() as this rank's next collective, in this thread, once all ranks have made the same
  // call and short_sum, if there is one, is there. Throws Error; all but Error(kMismatch) end the
  // group.
  template <typename Body>
  void run(const Call& call, std::optional<Nanoseconds> own_timeout, const Body& body,
           const ShortSum* short_sum = nullptr) {
    const std::lock_guard lock(mutex_);
    begin(call, own_timeout);
    try {
      agree(call, short_sum);
      body();
      monitor_.end_call();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kMismatch) {
        monitor_.end_call();
      } else {
        fail(error);
      }
      throw;
    } catch (const std::exception& error) {
      abort(join("rank ", rank_, " failed in ", call.kind_name(), ": ", error.what()));
      throw;
    }
  }

  // ---- for the body

  // For leaders: what another host has contributed to a short sum.
  std::byte* contribution_of(int host) {
    return messages_[static_cast<size_t>(host)].bytes + sizeof(Greeting);
  }
  std::byte* short_result() { return verdict_.short_result; }

  Engine::Transfer send(const void* data, size_t num_bytes, int peer, int tag) {
    return engine_.send(data, num_bytes, peer, tag);
  }
  Engine::Transfer recv(void* data, size_t num_bytes, int peer, int tag) {
    return engine_.recv(data, num_bytes, peer, tag);
  }
  // patience: beyond the call's timeout.
  void wait(Engine::Transfer& transfer, std::string_view phase, Nanoseconds patience = {});
  void wait(std::vector<Engine::Transfer>& transfers, std::string_view phase,
            Nanoseconds patience = {});
  void run_local(const Call& call, const cpu::Buffers& buffers);

  // For a message outside collectives, in any thread. A failure ends the group.
  void wait_outside(Engine::Transfer& transfer, std::string_view call);

  // ---- the group's life, from any thread

  void check_usable(std::string_view call) const { local_->check_usable(call); }
  // Fails every waiting and later call on every rank.
  void fail(const Error& error);
  void abort(const std::string& reason);
  // hook() ends waits that the bridge knows nothing of. It runs once the group has failed and the
  // other hosts have been told, since it may take long. Null: none from now on; once this has
  // returned, no hook runs.
  void on_failure(std::function<void()> hook);
  // Blocks until the group has failed, at most that long: for who has seen what may be a
  // consequence, and wants to report the cause.
  void await_failure(std::chrono::milliseconds timeout);
  // The timeout of waits outside collectives.
  std::chrono::milliseconds timeout() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(local_->timeout());
  }
  // "rota.recv: rank 2/4", the start of a message.
  std::string prefix(std::string_view call) const;

  // ---- for the monitor

  Engine& engine() { return engine_; }
  // Whether a wait that is no call's may need any rank.
  bool waits_outside_calls();
  void run_failure_hook();

 private:
  // A leader's call, and whether the ranks of its host agree on it.
  struct alignas(64) Greeting {
    uint64_t epoch = 0;
    Call::Words words{};
    std::array<char, 448> disagreement{};  // of that host, zero-terminated; empty: they agree
  };

  // What a leader tells the ranks of its host.
  struct alignas(64) Verdict {
    uint64_t mismatch_bytes = 0;  // of a text that follows; 0: all ranks have made the same call
    alignas(64) std::byte short_result[kMaxShortBytes];
  };

  bool is_leader() const { return local_rank() == 0; }
  void begin(const Call& call, std::optional<Nanoseconds> own_timeout);
  void agree(const Call& call, const ShortSum* short_sum);
  // Leaders exchange their greetings. disagreement: of this host's ranks.
  void greet(const Call& call, const std::optional<Error>& disagreement, const ShortSum* short_sum);
  bool all_called(const Call& call) const;
  // Shares a leader's data with the ranks of its host.
  void share(void* data, size_t num_bytes);
  const Greeting& greeting_of(int host) const {
    return *reinterpret_cast<const Greeting*>(messages_[static_cast<size_t>(host)].bytes);
  }
  Error mismatch(const Call& call) const;
  void end_waits(const Error& error);

  schedule::Hosts hosts_;
  int rank_;
  std::shared_ptr<Communicator> local_;
  Engine engine_;
  Inbox inbox_;
  std::vector<int> partnered_;

  std::mutex mutex_;  // one collective at a time
  uint64_t epoch_ = 0;
  std::string_view kind_name_;
  std::optional<Nanoseconds> own_timeout_;
  // A leader's greeting, by host, which may be followed by a contribution.
  struct alignas(64) Message {
    std::byte bytes[sizeof(Greeting) + kMaxShortBytes];
  };
  std::vector<Message> messages_;
  Verdict verdict_;

  std::mutex hook_mutex_;
  std::function<void()> failure_hook_;  // guarded by it
  std::mutex failure_mutex_;
  bool has_failed_ = false;  // guarded by it
  std::condition_variable failed_;

  HostMonitor monitor_;  // last: goes first
};

}  // namespace rota::hosts
