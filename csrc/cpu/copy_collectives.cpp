// Broadcast, all-gather, gather and scatter: bytes only, no arithmetic.
#include "cpu/copy.h"
#include "cpu/executor.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Fills the outputs of all other ranks' parts; source_of(peer) is where this rank finds one.
template <typename SourceOf>
void copy_from_peers(const Call& call, const Buffers& buffers, int rank, int world_size,
                     const OutputCopier& copier, SourceOf source_of) {
  for (int i = 0; i < world_size - 1; ++i) {
    const int peer = schedule::rotated_peer(rank, world_size, i);
    const Part& output = buffers.outputs[peer];
    copier.copy(output.data, source_of(peer), bytes_of(call, output));
  }
}

OutputCopier copier_for(const Call& call, const Buffers& buffers, int world_size) {
  return {total_of(call, buffers.outputs, world_size), world_size};
}

// Where a root fills slots, it refills that of round r once all other ranks have drained round r.

class Broadcast final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers&, int,
                                        uint64_t) const override {
    return call.num_bytes();
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    if (mailboxes.rank() != call.root) return;
    mailboxes.stores_to_all().store(mailboxes.own(), buffers.data, call.num_bytes());
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    if (mailboxes.rank() != call.root) {
      copy_bytes(buffers.data, mailboxes.of(call.root), call.num_bytes());
    }
    return 0;
  }

  Source source_of(const Call& call, const Buffers& buffers, int rank, int) const override {
    if (rank != call.root) return {.kind = Source::Kind::kNothing};
    return {.kind = Source::Kind::kTensor, .tensor = buffers.data};
  }

  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    if (exchange.rank() == call.root) {
      exchange.wait_drained_by_peers(0, "broadcast in place");
    } else {
      const OutputCopier copier(call.num_bytes(), exchange.world_size());
      copier.copy(buffers.data, sources[static_cast<size_t>(call.root)], call.num_bytes());
      exchange.publish_drained(0);
    }
    return 1;
  }

  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const Part whole{buffers.data, call.num_elems};
    const OutputCopier copier(call.num_bytes(), exchange.world_size());
    const uint64_t num_rounds = schedule::ceil_div(call.num_bytes(), exchange.slot_bytes());
    const uint64_t num_slots = exchange.use_copy_slots(call.num_bytes());
    const bool is_root = exchange.rank() == call.root;
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range chunk = schedule::chunk_of(call.num_bytes(), exchange.slot_bytes(), round);
      if (is_root) {
        if (round >= num_slots) exchange.wait_drained_by_peers(round - num_slots, "broadcast send");
        exchange.stores_to_all().store(exchange.own_slot(round), at(whole, chunk.begin),
                                       chunk.num_elems);
        exchange.publish_filled(round);
      } else {
        exchange.wait_filled(call.root, round, "broadcast receive");
        copier.copy(at(whole, chunk.begin), exchange.slot(call.root, round), chunk.num_elems);
        exchange.publish_drained(round);
      }
    }
    return num_rounds;
  }
};

class AllGather final : public Executor {
  // Longer parts go through slots, also where they would fit into a mailbox: mailboxes are shorter
  // than a second-level cache, from which a peer reads more slowly than from the shared one.
  static constexpr uint64_t kLongestMessage = 8 << 10;

 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    const uint64_t longest = longest_of(call, buffers.outputs, world_size);
    return longest <= kLongestMessage ? std::optional(longest) : std::nullopt;
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    copy_bytes(mailboxes.own(), buffers.inputs->data, bytes_of(call, *buffers.inputs));
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const OutputCopier copier = copier_for(call, buffers, mailboxes.world_size());
    copy_own(call, *buffers.inputs, buffers.outputs[mailboxes.rank()], copier);
    copy_from_peers(call, buffers, mailboxes.rank(), mailboxes.world_size(), copier,
                    [&](int peer) { return mailboxes.of(peer); });
    return 0;
  }

  Source source_of(const Call&, const Buffers& buffers, int, int) const override {
    return {.kind = Source::Kind::kTensor, .tensor = buffers.inputs->data};
  }

  uint64_t source_bytes(const Call& call, const Buffers& buffers, int peer, int) const override {
    return bytes_of(call, buffers.outputs[peer]);
  }

  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    const OutputCopier copier = copier_for(call, buffers, exchange.world_size());
    copy_from_peers(call, buffers, exchange.rank(), exchange.world_size(), copier,
                    [&](int peer) { return sources[static_cast<size_t>(peer)]; });
    exchange.publish_drained(0);
    copy_own(call, *buffers.inputs, buffers.outputs[exchange.rank()], copier);
    exchange.wait_drained_by_peers(0, "all_gather in place");
    return 1;
  }

  // A slot is overwritten in round r + 2 at the earliest, but only after every peer has filled the
  // round before, which a peer does after it has read round r. A rank whose part has ended fills
  // empty chunks.
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const uint64_t longest = longest_of(call, buffers.outputs, exchange.world_size());
    const uint64_t num_rounds = schedule::ceil_div(longest, exchange.slot_bytes());
    if (exchange.world_size() == 2) {
      exchange.let_slots_change_hands();
    } else {
      exchange.use_copy_slots(longest);
    }
    const OutputCopier copier = copier_for(call, buffers, exchange.world_size());
    const Part& own_output = buffers.outputs[exchange.rank()];
    const bool copies_own = buffers.inputs->data != own_output.data;
    const auto chunk_of = [&](const Part& part, uint64_t round) {
      return schedule::chunk_of(bytes_of(call, part), exchange.slot_bytes(), round);
    };
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range own = chunk_of(*buffers.inputs, round);
      exchange.stores_to_all().store(exchange.own_slot(round), at(*buffers.inputs, own.begin),
                                     own.num_elems);
      exchange.publish_filled(round);
      // Once more from the caches, while the peers fill theirs.
      if (copies_own) {
        copier.copy(at(own_output, own.begin), at(*buffers.inputs, own.begin), own.num_elems);
      }
      for (int i = 0; i < exchange.world_size() - 1; ++i) {
        const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
        const Range chunk = chunk_of(buffers.outputs[peer], round);
        exchange.wait_filled(peer, round, "all_gather receive");
        copier.copy(at(buffers.outputs[peer], chunk.begin), exchange.slot(peer, round),
                    chunk.num_elems);
      }
    }
    return num_rounds;
  }
};

class Gather final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers&, int,
                                        uint64_t) const override {
    return call.num_bytes();
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    if (mailboxes.rank() == call.root) return;
    mailboxes.stores_to(call.root).store(mailboxes.own(), buffers.inputs->data, call.num_bytes());
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    if (mailboxes.rank() != call.root) return 0;
    const OutputCopier copier = copier_for(call, buffers, mailboxes.world_size());
    copy_own(call, *buffers.inputs, buffers.outputs[call.root], copier);
    copy_from_peers(call, buffers, mailboxes.rank(), mailboxes.world_size(), copier,
                    [&](int peer) { return mailboxes.of(peer); });
    return 0;
  }

  Source source_of(const Call& call, const Buffers& buffers, int rank, int) const override {
    if (rank == call.root) return {.kind = Source::Kind::kNothing};
    return {.kind = Source::Kind::kTensor, .tensor = buffers.inputs->data};
  }

  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    if (exchange.rank() != call.root) {
      exchange.wait_drained(call.root, 0, "gather in place");
      return 1;
    }
    const OutputCopier copier = copier_for(call, buffers, exchange.world_size());
    copy_from_peers(call, buffers, exchange.rank(), exchange.world_size(), copier,
                    [&](int peer) { return sources[static_cast<size_t>(peer)]; });
    exchange.publish_drained(0);
    copy_own(call, *buffers.inputs, buffers.outputs[call.root], copier);
    return 1;
  }

  // A rank refills the slot of round r once the root has drained round r.
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const uint64_t num_rounds = schedule::ceil_div(call.num_bytes(), exchange.slot_bytes());
    const uint64_t num_slots = exchange.use_copy_slots(call.num_bytes());
    const OutputCopier copier(static_cast<uint64_t>(exchange.world_size()) * call.num_bytes(),
                              exchange.world_size());
    const bool is_root = exchange.rank() == call.root;
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range chunk = schedule::chunk_of(call.num_bytes(), exchange.slot_bytes(), round);
      if (!is_root) {
        if (round >= num_slots) exchange.wait_drained(call.root, round - num_slots, "gather send");
        exchange.stores_to(call.root).store(exchange.own_slot(round),
                                            at(*buffers.inputs, chunk.begin), chunk.num_elems);
        exchange.publish_filled(round);
        continue;
      }
      for (int i = 0; i < exchange.world_size() - 1; ++i) {
        const int peer = schedule::rotated_peer(exchange.rank(), exchange.world_size(), i);
        exchange.wait_filled(peer, round, "gather receive");
        copier.copy(at(buffers.outputs[peer], chunk.begin), exchange.slot(peer, round),
                    chunk.num_elems);
      }
      exchange.publish_drained(round);
    }
    if (is_root) copy_own(call, *buffers.inputs, buffers.outputs[call.root], copier);
    return num_rounds;
  }
};

class Scatter final : public Executor {
 public:
  // The root's message holds the parts of all others.
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers&, int world_size,
                                        uint64_t) const override {
    return static_cast<uint64_t>(world_size - 1) * call.num_bytes();
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    if (mailboxes.rank() != call.root) return;
    for (int peer = 0; peer < mailboxes.world_size(); ++peer) {
      if (peer == call.root) continue;
      mailboxes.stores_to(peer).store(mailboxes.part(call.root, peer, call.num_bytes()),
                                      buffers.inputs[peer].data, call.num_bytes());
    }
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const int rank = mailboxes.rank();
    const OutputCopier copier(call.num_bytes(), mailboxes.world_size());
    if (rank == call.root) {
      copy_own(call, buffers.inputs[rank], *buffers.outputs, copier);
    } else {
      copier.copy(buffers.outputs->data, mailboxes.part(call.root, rank, call.num_bytes()),
                  call.num_bytes());
    }
    return 0;
  }

  // Peers can read parts that are one tensor.
  Source source_of(const Call& call, const Buffers& buffers, int rank,
                   int world_size) const override {
    if (rank != call.root) return {.kind = Source::Kind::kNothing};
    if (!are_one_tensor(call, buffers.inputs, world_size)) return {};
    return {.kind = Source::Kind::kTensor, .tensor = buffers.inputs->data};
  }

  uint64_t source_bytes(const Call& call, const Buffers&, int, int world_size) const override {
    return static_cast<uint64_t>(world_size) * call.num_bytes();
  }

  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    const OutputCopier copier(call.num_bytes(), exchange.world_size());
    if (exchange.rank() != call.root) {
      const uint64_t offset = static_cast<uint64_t>(exchange.rank()) * call.num_bytes();
      copier.copy(buffers.outputs->data, sources[static_cast<size_t>(call.root)] + offset,
                  call.num_bytes());
      exchange.publish_drained(0);
      return 1;
    }
    copy_own(call, buffers.inputs[call.root], *buffers.outputs, copier);
    exchange.wait_drained_by_peers(0, "scatter in place");
    return 1;
  }

  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const uint64_t share = exchange.share_of_slot();
    const uint64_t num_rounds = schedule::ceil_div(call.num_bytes(), share);
    const uint64_t num_slots = exchange.use_copy_slots(exchange.slot_bytes());
    const int world_size = exchange.world_size();
    const OutputCopier copier(call.num_bytes(), world_size);
    const auto chunk_of = [&](uint64_t round) {
      return schedule::chunk_of(call.num_bytes(), share, round);
    };
    if (exchange.rank() != call.root) {
      for (uint64_t round = 0; round < num_rounds; ++round) {
        const Range chunk = chunk_of(round);
        exchange.wait_filled(call.root, round, "scatter receive");
        copier.copy(at(*buffers.outputs, chunk.begin),
                    exchange.share(call.root, exchange.rank(), round), chunk.num_elems);
        exchange.publish_drained(round);
      }
      return num_rounds;
    }
    const Part& own = buffers.inputs[call.root];
    const bool copies_own = own.data != buffers.outputs->data;
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range chunk = chunk_of(round);
      if (round >= num_slots) exchange.wait_drained_by_peers(round - num_slots, "scatter send");
      for (int i = 0; i < world_size - 1; ++i) {
        const int peer = schedule::rotated_peer(call.root, world_size, i);
        exchange.stores_to(peer).store(exchange.share(call.root, peer, round),
                                       at(buffers.inputs[peer], chunk.begin), chunk.num_elems);
      }
      exchange.publish_filled(round);
      // While the peers drain theirs.
      if (copies_own) {
        copier.copy(at(*buffers.outputs, chunk.begin), at(own, chunk.begin), chunk.num_elems);
      }
    }
    return num_rounds;
  }
};

}  // namespace

constexpr Broadcast kBroadcastExecutor;
const Executor& broadcast_executor = kBroadcastExecutor;
constexpr AllGather kAllGatherExecutor;
const Executor& all_gather_executor = kAllGatherExecutor;
constexpr Gather kGatherExecutor;
const Executor& gather_executor = kGatherExecutor;
constexpr Scatter kScatterExecutor;
const Executor& scatter_executor = kScatterExecutor;

}  // namespace rota::cpu
