// All-reduce on the CPU: one rank's part, in place, in the caller's thread.
//
//   algorithm     stages                     read from peers, per rank        summed in
//   one_shot      1                          (p-1) * S                        ascending rank
//   two_shot      2                          2*(p-1)/p * S                    ascending rank
//   ordered_ring  chunks + 2*(p-1)           S partial + S results            ascending rank
//   ring          2*(p-1) per round          2*(p-1)/p * S                    ring order, per piece
//
// p ranks, S bytes of message in the wire dtype (partial sums of rings: in the hop dtype).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cpu/exchange.h"
#include "schedule/select.h"

namespace rota::cpu {

struct AllReduceArgs {
  void* data;  // num_elems elements of dtype, contiguous
  uint64_t num_elems;
  DType dtype;
  ReduceOp op;
  DType wire;  // what contributions and results are rounded to
  DType hop;   // what rings pass partial sums on in
  schedule::Algorithm algorithm;
};

// One round in one message, the flag of which is the post itself: first every rank contributes,
// then, once all have posted, every rank completes.
bool fits_mailbox(const AllReduceArgs& args, const transport::Geometry& geometry);
void contribute_to_mailbox(const AllReduceArgs& args, const transport::Transport& transport,
                           int parity);
void reduce_mailboxes(const AllReduceArgs& args, const transport::Transport& transport, int parity);

// Pipelined through slots, once all ranks have posted. Returns the number of rounds used, which is
// the same on every rank.
uint64_t all_reduce(const AllReduceArgs& args, Exchange& exchange);

}  // namespace rota::cpu
