#include "tensor/hosts/exchange_parts.h"

#include <array>
#include <vector>

#include "tensor/hosts/tags.h"

namespace rota::tensors {
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

// Of an all-to-all, only the two ranks of a pair know how long their parts are.
void compare_lengths(Bridge& bridge, const Call& call, const std::vector<int>& others,
                     const Exchange& exchange) {
  using Lengths = std::array<uint64_t, 2>;  // sent, expected
  const auto world_size = static_cast<size_t>(bridge.world_size());
  std::vector<Lengths> own(world_size), theirs(world_size);
  std::vector<Engine::Transfer> transfers;
  for (const int peer : others) {
    const auto i = static_cast<size_t>(peer);
    own[i] = {exchange.sent[i].num_elems, exchange.expected[i].num_elems};
    transfers.push_back(bridge.recv(&theirs[i], sizeof(Lengths), peer, kLengthTag));
  }
  for (const int peer : others) {
    transfers.push_back(
        bridge.send(&own[static_cast<size_t>(peer)], sizeof(Lengths), peer, kLengthTag));
  }
  bridge.wait(transfers, "lengths");
  for (const int peer : others) {
    const auto i = static_cast<size_t>(peer);
    if (theirs[i][0] == own[i][1] && theirs[i][1] == own[i][0]) continue;
    const Error error(ErrorKind::kMismatch,
                      join("rota.", call.kind_name(), ": ranks disagree: rank ", bridge.rank(),
                           " sends ", own[i][0], " bytes to rank ", peer, " and expects ",
                           own[i][1], "; rank ", peer, " expects ", theirs[i][1], " and sends ",
                           theirs[i][0], "; nothing was written: give both the same splits"));
    bridge.fail(error);  // the others do not know
    throw error;
  }
}

}  // namespace

void exchange_parts(Bridge& bridge, const Call& call, const cpu::Buffers& buffers) {
  const schedule::Hosts& hosts = bridge.hosts();
  const Exchange exchange = plan(bridge, call, buffers);
  std::vector<int> others;
  // From the own rank on, so that not all ranks send to the same one.
  for (int i = 1; i < bridge.world_size(); ++i) {
    const int peer = (bridge.rank() + i) % bridge.world_size();
    if (hosts.place_of(peer).host != bridge.host()) others.push_back(peer);
  }
  if (call.kind == CollectiveKind::kAllToAll) compare_lengths(bridge, call, others, exchange);

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

}  // namespace rota::tensors
