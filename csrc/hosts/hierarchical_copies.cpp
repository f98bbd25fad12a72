// Collectives over several hosts that move or sum parts for each rank. Every byte crosses between
// two hosts once: each rank exchanges it with its partner there (schedule/hosts.h), and the ranks
// of a host share it through their memory. Chunks are pipelined.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "cpu/float_environment.h"
#include "cpu/part_codec.h"
#include "hosts/executor.h"
#include "schedule/chunk.h"

namespace rota::hosts {
namespace {

using cpu::at;
using cpu::Part;
using schedule::Range;
using Transfers = std::vector<Engine::Transfer>;

constexpr uint64_t kCopyChunkBytes = 1 << 20;  // of each rank's part
constexpr uint64_t kStarBytes = 64 << 10;  // the longest broadcast that its root sends to all hosts

// What a chunk has of a part of bytes.
Part chunk_of_part(const Part& part, uint64_t chunk) {
  const Range range = schedule::chunk_of(part.num_elems, kCopyChunkBytes, chunk);
  return {at(part, range.begin), range.num_elems};
}

uint64_t num_chunks_of(std::span<const Part> parts, uint64_t chunk_elems) {
  uint64_t longest = 0;
  for (const Part& part : parts) longest = std::max(longest, part.num_elems);
  return schedule::ceil_div(longest, chunk_elems);
}

// Calls body(ranks) for the ranks of a host, as many at a time as this host has: the i-th of them
// is a matter of this host's rank i. Where there is none, it is -1.
template <typename Body>
void for_each_row(const Bridge& bridge, int host, const Body& body) {
  const int local_size = bridge.local_size();
  std::vector<int> ranks(static_cast<size_t>(local_size));
  for (int first = 0; first < bridge.hosts().local_size(host); first += local_size) {
    for (int i = 0; i < local_size; ++i) {
      const bool is_there = first + i < bridge.hosts().local_size(host);
      ranks[static_cast<size_t>(i)] = is_there ? bridge.hosts().rank_at(host, first + i) : -1;
    }
    body(ranks);
  }
}

// All-gather of bytes. outputs: by rank; the own one holds the own part.
void gather_bytes(Bridge& bridge, std::span<const Part> outputs) {
  const uint64_t num_chunks = num_chunks_of(outputs, kCopyChunkBytes);
  const auto output = [&](int rank, uint64_t chunk) {
    return chunk_of_part(outputs[static_cast<size_t>(rank)], chunk);
  };
  const auto share = [&](int host, uint64_t chunk) {
    for_each_row(bridge, host, [&](const std::vector<int>& ranks) {
      std::vector<Part> parts;
      for (const int rank : ranks) {
        parts.push_back(rank < 0 ? Part{outputs[0].data, 0} : output(rank, chunk));
      }
      bridge.run_local(
          local_all_gather(parts),
          {.inputs = &parts[static_cast<size_t>(bridge.local_rank())], .outputs = parts.data()});
    });
  };
  Transfers incoming, next_incoming, outgoing;
  for (uint64_t step = 0; step <= num_chunks; ++step) {
    if (step < num_chunks) {
      for (const int rank : bridge.partnered()) {
        const Part part = output(rank, step);
        next_incoming.push_back(bridge.recv(part.data, part.num_elems, rank, kResultTag));
      }
      const Part own = output(bridge.rank(), step);
      for (int host = 0; host < bridge.hosts().num_hosts(); ++host) {
        if (host == bridge.host()) continue;
        outgoing.push_back(bridge.send(own.data, own.num_elems,
                                       bridge.hosts().partner_of(bridge.rank(), host), kResultTag));
      }
      share(bridge.host(), step);
    }
    if (step > 0) {
      bridge.wait(incoming, "parts");
      for (int host = 0; host < bridge.hosts().num_hosts(); ++host) {
        if (host != bridge.host()) share(host, step - 1);
      }
    }
    incoming.swap(next_incoming);
  }
  bridge.wait(outgoing, "the network");
}

// R: cpu::Reducer or cpu::BucketReducer.
template <typename R>
class ReduceScatter {
 public:
  explicit ReduceScatter(const Task& task)
      : bridge_(task.bridge),
        scratch_(task.scratch),
        wire_(task.call.wire),
        dtype_(task.call.dtype),
        reducers_(task),
        inputs_(task.buffers.inputs, static_cast<size_t>(bridge_.world_size())),
        chunk_elems_(kCopyChunkBytes / reducers_.elem_bytes()),
        to_tensor_(reducers_.to_tensor({.data = task.buffers.outputs->data})) {}

  void run() {
    const cpu::IeeeFloatScope ieee;
    const uint64_t num_chunks = num_chunks_of(inputs_, chunk_elems_);
    for (uint64_t step = 0; step <= num_chunks; ++step) {
      if (step < num_chunks) contribute(step);
      if (step > 0) finish(step - 1);
    }
  }

 private:
  static constexpr uint64_t kNumPlaces = 2;
  struct Place {
    std::byte* own = nullptr;              // this host's sum of the own part
    std::vector<WirePlace> contributions;  // by host
    Transfers incoming, outgoing;
  };

  int num_hosts() const { return bridge_.hosts().num_hosts(); }
  Range range_of(int rank, uint64_t chunk) const {
    return schedule::chunk_of(inputs_[static_cast<size_t>(rank)].num_elems, chunk_elems_, chunk);
  }
  size_t chunk_bytes() const { return chunk_elems_ * reducers_.elem_bytes(); }
  size_t wire_bytes(uint64_t num_elems) const { return wire_.num_bytes(num_elems); }
  // Room for as many places of a chunk.
  Places places(size_t number, size_t num_places) {
    return {scratch_, number, num_places * Scratch::round_up(chunk_bytes())};
  }

  Part contribution(int rank, uint64_t chunk, Places& widened) const {
    const Range range = range_of(rank, chunk);
    std::byte* src = at(inputs_[static_cast<size_t>(rank)], range.begin * info(dtype_).num_bytes);
    return {reducers_.contribution(src, range.num_elems,
                                   [&](size_t num_bytes) { return widened.take(num_bytes); }),
            range.num_elems};
  }

  // Sums a chunk of all parts within the host, and sends the sums to those whose parts they are.
  void contribute(uint64_t chunk) {
    Place& place = places_[chunk % kNumPlaces];
    const size_t first_buffer = chunk % kNumPlaces * 4;
    const auto world_size = static_cast<size_t>(bridge_.world_size());
    Places widened = places(first_buffer, world_size);
    Places sums = places(first_buffer + 1, world_size + 1);
    Places outgoing = places(first_buffer + 2, world_size);
    Places incoming = places(first_buffer + 3, world_size + 1);

    const Range own = range_of(bridge_.rank(), chunk);
    place.contributions.clear();
    for (int host = 0; host < num_hosts(); ++host) {
      std::byte* to = incoming.take(wire_bytes(own.num_elems));
      place.contributions.push_back(wire_.place(to, own.num_elems));
      if (host == bridge_.host()) continue;
      place.incoming.push_back(bridge_.recv(to, wire_bytes(own.num_elems),
                                            bridge_.hosts().partner_of(bridge_.rank(), host),
                                            kContributionTag));
    }
    for (int i = 0; i < num_hosts(); ++i) {
      // Other hosts first, so that their data is on its way early. All ranks of a host keep the
      // same order.
      const int host = (bridge_.host() + 1 + i) % num_hosts();
      for_each_row(bridge_, host, [&](const std::vector<int>& ranks) {
        std::vector<Part> parts;
        for (const int rank : ranks) {
          parts.push_back(rank < 0 ? Part{inputs_[0].data, 0} : contribution(rank, chunk, widened));
        }
        const int receiver = ranks[static_cast<size_t>(bridge_.local_rank())];
        const Range range = receiver < 0 ? Range{0, 0} : range_of(receiver, chunk);
        std::byte* partial = sums.take(range.num_elems * reducers_.elem_bytes());
        reducers_.sum_locally(parts, {partial, range.num_elems});
        if (receiver < 0) return;
        const R over_hosts = reducers_.over_hosts(partial, range);
        if (host == bridge_.host()) {
          WirePlace& contribution = place.contributions[static_cast<size_t>(host)];
          contribution = reducers_.own_contribution(over_hosts, range, contribution);
          place.own = partial;
          return;
        }
        std::byte* message = outgoing.take(wire_bytes(range.num_elems));
        over_hosts.pack(range, wire_.place(message, range.num_elems));
        place.outgoing.push_back(
            bridge_.send(message, wire_bytes(range.num_elems), receiver, kContributionTag));
      });
    }
  }

  void finish(uint64_t chunk) {
    Place& place = places_[chunk % kNumPlaces];
    bridge_.wait(place.incoming, "contributions");
    const Range own = range_of(bridge_.rank(), chunk);
    if (own.num_elems > 0) {
      const WirePlace result =
          wire_.place(scratch_.at_least(kNumPlaces * 4, chunk_bytes()), own.num_elems);
      reducers_.over_hosts(place.own, own).reduce(place.contributions.data(), own, {&result, 1});
      to_tensor_.unpack(result, own);
    }
    bridge_.wait(place.outgoing, "the network");
  }

  Bridge& bridge_;
  Scratch& scratch_;
  const WireFormat& wire_;
  DType dtype_;
  const LevelReducers<R> reducers_;
  std::span<const Part> inputs_;
  uint64_t chunk_elems_;
  const R to_tensor_;
  std::array<Place, kNumPlaces> places_;
};

// The bytes that a rank sends and expects, by rank.
struct Exchange {
  std::vector<Part> sent;
  std::vector<Part> expected;
};

Exchange plan(const Task& task) {
  const auto& [bridge, scratch, call, orders, buffers, own_timeout] = task;
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
void compare_lengths(const Task& task, const Exchange& exchange) {
  const Bridge& bridge = task.bridge;
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
  hierarchical_all_gather({.bridge = task.bridge,
                           .scratch = task.scratch,
                           .call = {.kind = CollectiveKind::kAllGather},
                           .buffers = {.inputs = &rows[own], .outputs = rows.data()}});
  for (size_t sender = 0; sender < world_size; ++sender) {
    for (size_t receiver = 0; receiver < world_size; ++receiver) {
      const uint64_t sent = lengths[sender * row + receiver];
      const uint64_t expected = lengths[receiver * row + world_size + sender];
      if (sent == expected) continue;
      const size_t elem_bytes = info(task.call.dtype).num_bytes;
      throw Error(ErrorKind::kMismatch,
                  join("rota.", task.call.kind_name(), ": ranks disagree: rank ", sender, " sends ",
                       sent / elem_bytes, " elements to rank ", receiver, ", which expects ",
                       expected / elem_bytes, "; nothing was written: give both the same splits"));
    }
  }
}

}  // namespace

void hierarchical_all_gather(const Task& task) {
  const auto& [bridge, scratch, call, orders, buffers, own_timeout] = task;
  const auto world_size = static_cast<size_t>(bridge.world_size());
  const auto own = static_cast<size_t>(bridge.rank());
  std::vector<Part> parts(buffers.outputs, buffers.outputs + world_size);
  const bool encodes = call.encodes_parts();
  size_t total = 0;
  for (Part& part : parts) {
    part.num_elems =
        encodes ? call.wire.num_bytes(part.num_elems) : part.num_elems * info(call.dtype).num_bytes;
    total += part.num_elems;
  }
  if (!encodes) {
    if (parts[own].data != buffers.inputs->data) {
      std::memmove(parts[own].data, buffers.inputs->data, parts[own].num_elems);
    }
    return gather_bytes(bridge, parts);
  }
  const cpu::IeeeFloatScope ieee;
  std::byte* encoded = scratch.at_least(0, total);
  for (Part& part : parts) {
    part.data = encoded;
    encoded += part.num_elems;
  }
  cpu::encode_part(call, *buffers.inputs, {0, buffers.inputs->num_elems}, at(parts[own], 0));
  gather_bytes(bridge, parts);
  for (size_t rank = 0; rank < world_size; ++rank) {
    const Part& output = buffers.outputs[rank];
    cpu::decode_part(call, at(parts[rank], 0), output, {0, output.num_elems});
  }
}

void hierarchical_broadcast(const Task& task) {
  Bridge& bridge = task.bridge;
  const Call& call = task.call;
  const schedule::Hosts& hosts = bridge.hosts();
  const int root_host = hosts.place_of(call.root).host;
  // The rank of a host that has the data first.
  const auto leader_of = [&](int host) {
    return host == root_host ? call.root : hosts.partner_of(call.root, host);
  };
  // The i-th host of the chain.
  const auto host_at = [&](int i) { return (root_host + i) % hosts.num_hosts(); };
  const int place = (bridge.host() - root_host + hosts.num_hosts()) % hosts.num_hosts();
  const bool is_star = call.num_bytes() <= kStarBytes;
  const int leader = leader_of(bridge.host());
  const Part whole{task.buffers.data, call.num_bytes()};
  const uint64_t num_chunks = num_chunks_of({&whole, 1}, kCopyChunkBytes);

  Transfers outgoing;
  const auto forward = [&](const Part& part) {
    const int first = is_star ? 1 : place + 1;
    const int end =
        is_star ? (place == 0 ? hosts.num_hosts() : 0) : std::min(place + 2, hosts.num_hosts());
    for (int i = first; i < end; ++i) {
      outgoing.push_back(bridge.send(part.data, part.num_elems, leader_of(host_at(i)), kResultTag));
    }
  };
  const auto expect = [&](uint64_t chunk) {
    const Part part = chunk_of_part(whole, chunk);
    const int sender = leader_of(host_at(is_star ? 0 : place - 1));
    return bridge.recv(part.data, part.num_elems, sender, kResultTag);
  };
  const bool is_receiver = bridge.rank() == leader && place > 0;
  Engine::Transfer next;
  if (is_receiver && num_chunks > 0) next = expect(0);
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const Part part = chunk_of_part(whole, chunk);
    if (is_receiver) {
      Engine::Transfer current = std::exchange(next, {});
      if (chunk + 1 < num_chunks) next = expect(chunk + 1);
      bridge.wait(current, "the root's data");
    }
    if (bridge.rank() == leader) forward(part);
    if (bridge.local_size() > 1) {
      bridge.run_local({.kind = CollectiveKind::kBroadcast,
                        .root = hosts.place_of(leader).local_rank,
                        .num_elems = part.num_elems},
                       {.data = part.data});
    }
  }
  bridge.wait(outgoing, "the network");
}

void hierarchical_reduce_scatter(const Task& task) {
  if (task.call.wire.is_block_scaled) {
    const Task bucket = as_bucket(task);
    ReduceScatter<cpu::BucketReducer>(bucket).run();
  } else {
    ReduceScatter<cpu::Reducer>(task).run();
  }
}

void exchange_parts(const Task& task) {
  Bridge& bridge = task.bridge;
  const schedule::Hosts& hosts = bridge.hosts();
  const Exchange exchange = plan(task);
  std::vector<int> others;
  // From the own rank on, so that not all ranks send to the same one.
  for (int i = 1; i < bridge.world_size(); ++i) {
    const int peer = (bridge.rank() + i) % bridge.world_size();
    if (hosts.place_of(peer).host != bridge.host()) others.push_back(peer);
  }
  if (task.call.kind == CollectiveKind::kAllToAll) compare_lengths(task, exchange);

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
