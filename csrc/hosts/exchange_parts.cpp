#include "hosts/exchange_parts.h"

#include <vector>

#include "hosts/hierarchical_copies.h"
#include "hosts/tags.h"

namespace rota::hosts {
namespace {

using cpu::Part;

// The bytes that a rank sends and expects, by rank.
struct Exchange {
  std::vector<Part> sent;
  std::vector<Part> expected;
};

Exchange plan(const Bridge& bridge, const Call& call, const cpu::Buffers& buffers) {
  const CollectiveRow& row = row_of(call.kind);
  const auto in_bytes = [&](const Part& part) {
    return Part{part.data, part.num_elems * info(call.dtype).num_bytes};
  };
  const auto goes = [&](int from, int to) {
    return is_among(row.contributors, from, call.root) && is_among(row.receivers, to, call.root);
  };
  Exchange exchange;
  for (int peer = 0; peer < bridge.world_size(); ++peer) {
    Part sent{nullptr, 0}, expected{nullptr, 0};
    if (goes(bridge.rank(), peer)) {
      sent = in_bytes(buffers.inputs[row.is_input_per_rank ? peer : 0]);
    }
    if (goes(peer, bridge.rank())) {
      expected = in_bytes(buffers.outputs[row.is_output_per_rank ? peer : 0]);
    }
    exchange.sent.push_back(sent);
    exchange.expected.push_back(expected);
  }
  return exchange;
}

// In an all-to-all, only the two ranks of a pair know how long their parts are. All ranks read what
// all say, so all come to the same verdict.
void compare_lengths(Bridge& bridge, Scratch& scratch, const Call& call, const Exchange& exchange) {
  const auto world_size = static_cast<size_t>(bridge.world_size());
  // Row by row: what a rank sends to each, and what it expects of each.
  const size_t row = 2 * world_size;
  std::vector<uint64_t> lengths(world_size * row);
  std::vector<Part> rows;
  for (size_t rank = 0; rank < world_size; ++rank) {
    rows.push_back({&lengths[rank * row], row * sizeof(uint64_t)});
  }
  const auto own = static_cast<size_t>(bridge.rank());
  for (size_t peer = 0; peer < world_size; ++peer) {
    lengths[own * row + peer] = exchange.sent[peer].num_elems;
    lengths[own * row + world_size + peer] = exchange.expected[peer].num_elems;
  }
  hierarchical_all_gather(bridge, scratch, {.kind = CollectiveKind::kAllGather},
                          {.inputs = &rows[own], .outputs = rows.data()});
  for (size_t sender = 0; sender < world_size; ++sender) {
    for (size_t receiver = 0; receiver < world_size; ++receiver) {
      const uint64_t sent = lengths[sender * row + receiver];
      const uint64_t expected = lengths[receiver * row + world_size + sender];
      if (sent == expected) continue;
      const size_t elem_bytes = info(call.dtype).num_bytes;
      throw Error(ErrorKind::kMismatch,
                  join("rota.", call.kind_name(), ": ranks disagree: rank ", sender, " sends ",
                       sent / elem_bytes, " elements to rank ", receiver, ", which expects ",
                       expected / elem_bytes, "; nothing was written: give both the same splits"));
    }
  }
}

}  // namespace

void exchange_parts(Bridge& bridge, Scratch& scratch, const Call& call,
                    const cpu::Buffers& buffers) {
  const schedule::Hosts& hosts = bridge.hosts();
  const Exchange exchange = plan(bridge, call, buffers);
  std::vector<int> others;
  // From the own rank on, so that not all ranks send to the same one.
  for (int i = 1; i < bridge.world_size(); ++i) {
    const int peer = (bridge.rank() + i) % bridge.world_size();
    if (hosts.place_of(peer).host != bridge.host()) others.push_back(peer);
  }
  if (call.kind == CollectiveKind::kAllToAll) compare_lengths(bridge, scratch, call, exchange);

  std::vector<Engine::Transfer> transfers;
  for (const int peer : others) {
    const Part& part = exchange.expected[static_cast<size_t>(peer)];
    transfers.push_back(bridge.recv(part.data, part.num_elems, peer, kResultTag));
  }
  for (const int peer : others) {
    const Part& part = exchange.sent[static_cast<size_t>(peer)];
    transfers.push_back(bridge.send(part.data, part.num_elems, peer, kResultTag));
  }
  std::vector<Part> local_sent, local_expected;
  for (const int peer : hosts.ranks_of(bridge.host())) {
    local_sent.push_back(exchange.sent[static_cast<size_t>(peer)]);
    local_expected.push_back(exchange.expected[static_cast<size_t>(peer)]);
  }
  bridge.run_local({.kind = CollectiveKind::kAllToAll},
                   {.inputs = local_sent.data(), .outputs = local_expected.data()});
  bridge.wait(transfers, "parts");
}

}  // namespace rota::hosts
