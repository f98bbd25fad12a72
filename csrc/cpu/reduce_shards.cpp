// Half of a bucket's all-reduce: each rank gets the float32 sums of its own pieces, not rounded
// once more, and measures them while they are in its caches.
#include "base/limits.h"
#include "cpu/bucket_packer.h"
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "schedule/direct.h"
#include "schedule/sum_order.h"

namespace rota::cpu {
namespace {

using schedule::Pieces;
using schedule::Range;

// One rank's part of a call.
class ShardReducer {
 public:
  ShardReducer(const Call& call, const Buffers& buffers, int rank, int world_size)
      : pieces_(*buffers.pieces),
        packer_(call, buffers, rank),
        wire_(call.wire),
        wire_loops_(element_loops().wire(call.wire)),
        additions_(call.order, world_size),
        sums_(buffers.sums),
        measures_(*buffers.measures),
        rank_(rank),
        world_size_(world_size),
        divisor_(call.pass.divisor) {}

  // A range of the owner's row, for that rank.
  void pack(int owner, const Range& range, const WirePlace& to) const {
    pieces_.for_each_tile(owner, range, [&](const Pieces::Tile& tile) {
      packer_.pack(tile.elems, tile.number, wire_.from(to, tile.offset));
    });
  }

  // place_of(peer): where the contribution of another rank to a range of this rank's row lies.
  template <typename PlaceOf>
  void reduce(const Range& range, PlaceOf place_of) const {
    WirePlace places[kMaxWorldSize];
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer != rank_) places[peer] = place_of(peer);
    }
    pieces_.for_each_tile(rank_, range, [&](const Pieces::Tile& tile) {
      EncodedTile own;
      WirePlace srcs[kMaxWorldSize];
      for (int peer = 0; peer < world_size_; ++peer) {
        srcs[peer] = peer == rank_ ? own.place() : wire_.from(places[peer], tile.offset);
      }
      packer_.pack(tile.elems, tile.number, own.place());
      finish_tile(tile, range.begin + tile.offset, srcs);
    });
  }

 private:
  void finish_tile(const Pieces::Tile& tile, uint64_t place, const WirePlace* srcs) const {
    const size_t num_elems = tile.elems.num_elems;
    float* sums = sums_ + place;
    wire_loops_.decode_sum({srcs, world_size_, additions_.of_ranks()}, sums, num_elems,
                           exact_factor(divisor_));
    divide_unless_exact(sums, num_elems, divisor_);
    measure(measures_, place / kTileElems, sums, num_elems);
  }

  const Pieces& pieces_;
  BucketPacker packer_;
  WireFormat wire_;
  const WireLoops& wire_loops_;
  schedule::Additions additions_;
  float* sums_;
  BucketMeasures& measures_;
  int rank_;
  int world_size_;
  float divisor_;
};

class ReduceShards final : public Executor {
 public:
  // A message holds the rows of all others.
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    return static_cast<uint64_t>(world_size - 1) * longest_packed(call, buffers);
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const IeeeFloatScope ieee;
    const ShardReducer reducer(call, buffers, mailboxes.rank(), mailboxes.world_size());
    for (int owner = 0; owner < mailboxes.world_size(); ++owner) {
      if (owner == mailboxes.rank()) continue;
      const Range row{0, buffers.pieces->row_elems(owner)};
      std::byte* part = mailboxes.part(mailboxes.rank(), owner, longest_packed(call, buffers));
      reducer.pack(owner, row, call.wire.place(part, row.num_elems));
    }
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const IeeeFloatScope ieee;
    const int rank = mailboxes.rank();
    const ShardReducer reducer(call, buffers, rank, mailboxes.world_size());
    const Range row{0, buffers.pieces->row_elems(rank)};
    reducer.reduce(row, [&](int peer) {
      return call.wire.place(mailboxes.part(peer, rank, longest_packed(call, buffers)),
                             row.num_elems);
    });
    return 0;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const IeeeFloatScope ieee;
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const schedule::Pieces& pieces = *buffers.pieces;
    const ShardReducer reducer(call, buffers, rank, world_size);
    const uint64_t round_elems = call.wire.capacity(exchange.share_of_slot(), kTileElems);
    const uint64_t num_rounds = schedule::ceil_div(pieces.longest_row(), round_elems);
    const auto chunk_of = [&](int owner, uint64_t round) {
      return schedule::chunk_of(pieces.row_elems(owner), round_elems, round);
    };
    exchange.let_slots_change_hands();
    for (uint64_t round = 0; round < num_rounds; ++round) {
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        const Range chunk = chunk_of(owner, round);
        reducer.pack(owner, chunk,
                     call.wire.place(exchange.share(rank, owner, round), chunk.num_elems));
      }
      exchange.publish_filled(round);
      exchange.wait_filled_by_peers(round, "reduce_shards");
      const Range own = chunk_of(rank, round);
      reducer.reduce(own, [&](int peer) {
        return call.wire.place(exchange.share(peer, rank, round), own.num_elems);
      });
    }
    return num_rounds;
  }

 private:
  static uint64_t longest_packed(const Call& call, const Buffers& buffers) {
    return call.wire.num_bytes(buffers.pieces->longest_row());
  }
};

}  // namespace

constexpr ReduceShards kReduceShardsExecutor;
const Executor& reduce_shards_executor = kReduceShardsExecutor;

}  // namespace rota::cpu
