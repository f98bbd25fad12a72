// Answers other processes that ask for memory of this one, without a call on its side: one socket
// and one thread for all that a process exposes. They exist only while it exposes anything or
// is connected with peers, for whom the thread holds the process's life.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/fork_safe.h"
#include "transport/handshake.h"
#include "transport/life.h"

namespace rota::transport {

// What a token stands for.
class Exposed {
 public:
  // Runs in the listener's thread with its mutex locked. Sends one Hello, or nothing. May keep the
  // connection.
  virtual void answer(UniqueFd& connection, ReceivedHello& received) = 0;

 protected:
  ~Exposed() = default;
};

class Listener {
 public:
  // Returns the process's listener, starting one if none is running.
  static std::shared_ptr<Listener> open();

  Listener();
  ~Listener();

  // Also guards what the answers of its Exposed use.
  std::mutex& mutex() { return mutex_; }
  Address address_of(uint64_t token) const { return {name_, token}; }
  void add(uint64_t token, Exposed& exposed);
  void remove(uint64_t token);

 private:
  void serve();
  void answer(UniqueFd& connection);

  const std::string name_;
  UniqueFd socket_;
  Life& life_;  // in the process's heap
  std::mutex mutex_;
  std::unordered_map<uint64_t, Exposed*> exposed_;  // by token; guarded by the mutex
  ForkSafe<std::thread> thread_;
};

}  // namespace rota::transport
