// A network between ranks that are threads: one more thread carries every message, a while after
// both of its ends were started. Memory that is used again before its message was waited for, or
// read before, is a data race that ThreadSanitizer sees.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "hosts/connections.h"

namespace rota::test {

class MemoryNetwork {
 public:
  // kData: a send is done once its message has been received. kLetters: once it is on its way.
  enum class Kind { kData, kLetters };

  explicit MemoryNetwork(Kind kind);
  ~MemoryNetwork();

  // Must not outlive this.
  hosts::ConnectionsPtr connect(int rank);
  // From now on what this rank sends does not arrive, and it receives nothing.
  void cut_off(int rank);

 private:
  struct End;
  class Handle;
  class RankConnections;
  using EndRef = std::shared_ptr<End>;
  using Ends = std::deque<EndRef>;

  hosts::Connections::MessageRef start(EndRef end);
  bool is_cut_off(const End& end) const;
  void match(int receiver, int tag);
  void run();
  static void carry(End& send, End& recv);

  const Kind kind_;
  std::mutex mutex_;
  // Guarded by it.
  std::map<std::pair<int, int>, Ends> sends_, recvs_;  // by receiver and tag, in the order of calls
  std::deque<std::pair<EndRef, EndRef>> carried_;      // send and recv, not carried yet
  std::optional<int> cut_off_;
  bool is_ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace rota::test
