// How each collective runs on the CPU: one rank's part, in the caller's thread. core/communicator.h
// calls these stages in one of three orders, all ranks in the same:
//
//   message   contribute, post, complete: what is short travels with the post
//   in place  post, run_in_place: peers read tensors where they lie
//   rounds    post, run_rounds: pipelined through slots
//
// csrc/README.md lists the cost of each algorithm.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/buffers.h"
#include "cpu/exchange.h"
#include "schedule/call.h"

namespace rota::cpu {

class Executor {
 public:
  // The size of a rank's message if one message is enough for the whole collective, at most
  // max_bytes; otherwise none. The same on every rank.
  virtual std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers,
                                                int world_size, uint64_t max_bytes) const = 0;
  // Each rank contributes before it posts, and completes once all ranks have posted. No output is
  // written before.
  virtual void contribute(const Call& call, const Buffers& buffers,
                          const Mailboxes& mailboxes) const = 0;
  // This and the next two return the number of rounds used, which is the same on every rank.
  virtual uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                            Exchange& exchange) const = 0;

  // What peers can read in place from this rank.
  virtual Source source_of(const Call&, const Buffers&, int /*rank*/, int /*world_size*/) const {
    return {};
  }
  // The size of what this rank reads there from a peer.
  virtual uint64_t source_bytes(const Call& call, const Buffers&, int /*peer*/,
                                int /*world_size*/) const {
    return call.num_bytes();
  }
  // Once all ranks have posted a source. No rank returns before its peers have read its tensor.
  virtual uint64_t run_in_place(const Call&, const Buffers&, const Sources&, Exchange&) const {
    return 0;
  }

  virtual uint64_t run_rounds(const Call& call, const Buffers& buffers,
                              Exchange& exchange) const = 0;

 protected:
  ~Executor() = default;
};

const Executor& executor_of(const Call& call);

}  // namespace rota::cpu
