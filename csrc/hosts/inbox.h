// The envelopes that have come from other hosts, and the recvs that wait for one. They match by
// source and tag, in the order in which the recvs were called and the envelopes came. No thread
// waits here: whoever delivers an envelope, or fails the group, ends the recv by its on_end().
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

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
  using Clock = std::chrono::steady_clock;
  // A recv's place in the queue.
  struct Place {
    int source;  // kAnyRank: any
    int64_t tag;
    Clock::time_point deadline;
    // Called once, when one of the next three is there, in any thread. The inbox is locked, so once
    // fail() has returned, all recvs have ended; it must neither wait nor call the inbox.
    std::function<void()> on_end;
    std::optional<Arrival> arrival;
    std::optional<Error> error;    // what fail() was given
    std::optional<int> neighbour;  // a rank of this host: set by whoever has called leave()
  };
  using PlaceRef = std::shared_ptr<Place>;

  // A message that no recv has asked for is taken in at once, so that both ranks of a pair may send
  // first. Throws Error(kTransport) if there is no memory for it.
  void deliver(int source, const Envelope& envelope, Engine& engine);
  void enter(const PlaceRef& place);
  // Whether a recv has no envelope yet.
  bool is_awaited() const;
  // One that has none although its deadline is over; null: none is overdue.
  PlaceRef overdue() const;
  // The recvs from any rank that have none, in the order of their calls.
  std::vector<PlaceRef> from_any() const;
  // Gives up the place of a recv from any rank, for a message that came another way, and returns
  // its on_end(); null if an envelope has matched it, or if such a recv with this tag was called
  // before it and still waits: that one takes the first message.
  std::function<void()> leave(const PlaceRef& place);
  // Ends all recvs, and later ones, with this error.
  void fail(const Error& error);

 private:
  static std::shared_ptr<EarlyData> take_in(int source, const Envelope& envelope, Engine& engine);
  static bool matches(const Place& place, int source, int64_t tag);
  std::function<void()> remove(const PlaceRef& place);

  mutable std::mutex mutex_;
  // Guarded by it.
  std::list<PlaceRef> places_;   // that nothing has matched
  std::list<Arrival> arrivals_;  // likewise
  std::optional<Error> error_;
};

}  // namespace rota::hosts
