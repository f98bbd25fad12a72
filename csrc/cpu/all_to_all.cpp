// All-to-all: each rank sends a part to each other rank. Parts may differ in length, and only their
// two ranks know how long one is. So each message starts with this rank's view of all its parts;
// every rank reads every view and comes to the same verdict before anything is written.
#include "base/error.h"
#include "cpu/copy.h"
#include "cpu/executor.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// The start of a message: the elements that its sender sends to each rank, then those that it
// expects from each. The parts follow, by receiver, if they fit into the message together; its own
// is not among them.
class View {
 public:
  View(const Mailboxes& mailboxes, int sender)
      : sender_(sender),
        lengths_(reinterpret_cast<uint64_t*>(mailboxes.of(sender))),
        world_size_(static_cast<size_t>(mailboxes.world_size())) {}

  uint64_t& sent_to(int rank) const { return lengths_[static_cast<size_t>(rank)]; }
  uint64_t& expected_from(int rank) const {
    return lengths_[world_size_ + static_cast<size_t>(rank)];
  }
  std::byte* parts() const { return reinterpret_cast<std::byte*>(lengths_ + 2 * world_size_); }

  // Where the part for `rank` starts in parts(), in bytes; with world_size, where the last one
  // ends. At most max_bytes + 1, because the lengths come from another process.
  uint64_t offset_of(int rank, size_t elem_bytes, uint64_t max_bytes) const {
    uint64_t offset = 0;
    for (int i = 0; i < rank; ++i) {
      if (i == sender_) continue;
      const uint64_t num_elems = schedule::min_of(sent_to(i), max_bytes + 1);
      offset = schedule::min_of(offset + num_elems * elem_bytes, max_bytes + 1);
    }
    return offset;
  }

 private:
  int sender_;
  uint64_t* lengths_;
  size_t world_size_;
};

class AllToAll final : public Executor {
 public:
  // All of the mailbox, because ranks do not know the lengths of others' parts.
  std::optional<uint64_t> message_bytes(const Call&, const Buffers&, int,
                                        uint64_t max_bytes) const override {
    return max_bytes;
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const int world_size = mailboxes.world_size();
    const View own(mailboxes, mailboxes.rank());
    for (int peer = 0; peer < world_size; ++peer) {
      own.sent_to(peer) = buffers.inputs[peer].num_elems;
      own.expected_from(peer) = buffers.outputs[peer].num_elems;
    }
    if (!travels_with_post(own, call, mailboxes)) return;
    std::byte* place = own.parts();
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == mailboxes.rank()) continue;
      const uint64_t num_bytes = bytes_of(call, buffers.inputs[peer]);
      mailboxes.stores_in_exchange_with(peer).store(place, buffers.inputs[peer].data, num_bytes);
      place += num_bytes;
    }
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange& exchange) const override {
    const int rank = mailboxes.rank();
    const int world_size = mailboxes.world_size();
    check_views(mailboxes);
    const OutputCopier copier(total_of(call, buffers.outputs, world_size), world_size);
    copy_own(call, buffers.inputs[rank], buffers.outputs[rank], copier);
    bool is_in_rounds[kMaxWorldSize];  // by sender
    uint64_t longest = 0;              // part of those
    for (int sender = 0; sender < world_size; ++sender) {
      const View view(mailboxes, sender);
      is_in_rounds[sender] = !travels_with_post(view, call, mailboxes);
      for (int receiver = 0; is_in_rounds[sender] && receiver < world_size; ++receiver) {
        if (receiver != sender) longest = schedule::max_of(longest, view.sent_to(receiver));
      }
      if (sender == rank || is_in_rounds[sender]) continue;
      const uint64_t offset = view.offset_of(rank, elem_bytes(call), room(mailboxes));
      const Part& output = buffers.outputs[sender];
      copier.copy(output.data, view.parts() + offset, bytes_of(call, output));
    }
    return run_rounds(call, buffers, is_in_rounds, longest * elem_bytes(call), copier, exchange);
  }

  // Every message has a view, so complete() starts the rounds.
  uint64_t run_rounds(const Call&, const Buffers&, Exchange&) const override { return 0; }

 private:
  static size_t elem_bytes(const Call& call) { return info(call.dtype).num_bytes; }

  // The bytes of parts that fit behind a view.
  static uint64_t room(const Mailboxes& mailboxes) {
    return mailboxes.num_bytes() -
           2 * sizeof(uint64_t) * static_cast<uint64_t>(mailboxes.world_size());
  }

  static bool travels_with_post(const View& view, const Call& call, const Mailboxes& mailboxes) {
    const uint64_t most = room(mailboxes);
    return view.offset_of(mailboxes.world_size(), elem_bytes(call), most) <= most;
  }

  static void check_views(const Mailboxes& mailboxes) {
    const int world_size = mailboxes.world_size();
    for (int receiver = 0; receiver < world_size; ++receiver) {
      const View view(mailboxes, receiver);
      for (int sender = 0; sender < world_size; ++sender) {
        const uint64_t sent = View(mailboxes, sender).sent_to(receiver);
        const uint64_t expected = view.expected_from(sender);
        if (sent == expected) continue;
        throw Error(ErrorKind::kMismatch,
                    join("rota.all_to_all: rank ", sender, " sends ", sent, " elements to rank ",
                         receiver, ", which expects ", expected,
                         "; nothing was written: make the sender's input split for the receiver "
                         "and the receiver's output split for the sender equal"));
      }
    }
  }

  // A rank refills the slot of round r once all its peers have drained round r. Ranks whose parts
  // travelled with the post only drain.
  static uint64_t run_rounds(const Call& call, const Buffers& buffers, const bool* is_in_rounds,
                             uint64_t longest_bytes, const OutputCopier& copier,
                             Exchange& exchange) {
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const uint64_t share = exchange.share_of_slot();
    const uint64_t num_rounds = schedule::ceil_div(longest_bytes, share);
    const uint64_t num_slots = world_size == 2 ? exchange.let_slots_change_hands()
                                               : exchange.use_copy_slots(exchange.slot_bytes());
    const auto chunk_of = [&](const Part& part, uint64_t round) {
      return schedule::chunk_of(bytes_of(call, part), share, round);
    };
    for (uint64_t round = 0; round < num_rounds; ++round) {
      if (is_in_rounds[rank]) {
        if (round >= num_slots) {
          exchange.wait_drained_by_peers(round - num_slots, "all_to_all send");
        }
        for (int i = 0; i < world_size - 1; ++i) {
          const int peer = schedule::rotated_peer(rank, world_size, i);
          const Range chunk = chunk_of(buffers.inputs[peer], round);
          exchange.stores_to(peer).store(exchange.share(rank, peer, round),
                                         at(buffers.inputs[peer], chunk.begin), chunk.num_elems);
        }
        exchange.publish_filled(round);
      }
      for (int i = 0; i < world_size - 1; ++i) {
        const int peer = schedule::rotated_peer(rank, world_size, i);
        if (!is_in_rounds[peer]) continue;
        const Range chunk = chunk_of(buffers.outputs[peer], round);
        exchange.wait_filled(peer, round, "all_to_all receive");
        copier.copy(at(buffers.outputs[peer], chunk.begin), exchange.share(peer, rank, round),
                    chunk.num_elems);
      }
      exchange.publish_drained(round);
    }
    return num_rounds;
  }
};

}  // namespace

constexpr AllToAll kAllToAllExecutor;
const Executor& all_to_all_executor = kAllToAllExecutor;

}  // namespace rota::cpu
