// The envelopes that have come from other hosts, and the recvs that wait for one. They match by
// source and tag, in the order in which the recvs were called and the envelopes came.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/fork_safe.h"
#include "hosts/engine.h"
#include "hosts/letters.h"

namespace rota::hosts {

class Inbox {
 public:
  // The data of a message that came before its recv, on its way or here.
  struct EarlyData {
    std::vector<std::byte> bytes;
    Engine::Transfer transfer;
  };
  struct Arrival {
    int source;
    Envelope envelope;
    std::shared_ptr<EarlyData> early;  // null: its recv asks for the data
  };
  // A recv's place in the queue.
  struct Place {
    int source;  // kAnyRank: any
    int64_t tag;
    std::optional<Arrival> arrival;
  };
  using PlaceRef = std::shared_ptr<Place>;

  // A message that no recv has asked for is taken in at once, so that both ranks of a pair may send
  // first. Throws Error(kTransport) if there is no memory for it.
  void deliver(int source, const Envelope& envelope, Engine& engine);
  PlaceRef enter(int source, int64_t tag);
  // Blocks until an envelope matches, or `patience` is over. Throws what fail() was given.
  std::optional<Arrival> wait(Place& place, std::chrono::milliseconds patience);
  // Whether a recv has no envelope yet.
  bool is_awaited() const;
  // Gives up the place of a recv from any rank, for a message that came another way. Returns false
  // if an envelope has matched it, or if such a recv with this tag was called before it and still
  // waits: each has a thread of its own, and whichever looked first would take the first message.
  bool leave(const PlaceRef& place);
  // Ends all waits with this error.
  void fail(const Error& error);

 private:
  static std::shared_ptr<EarlyData> take_in(int source, const Envelope& envelope, Engine& engine);
  static bool matches(const Place& place, int source, int64_t tag);

  mutable std::mutex mutex_;
  // Guarded by it.
  std::list<PlaceRef> places_;   // that nothing has matched
  std::list<Arrival> arrivals_;  // likewise
  std::optional<Error> error_;
  ForkSafe<std::condition_variable> changed_;
};

}  // namespace rota::hosts
