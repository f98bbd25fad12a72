// The other half: each rank updates the parameters of its own pieces and sends them to all others.
// A tile's gradients, state and parameters pass through the caches once.
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Pieces;
using schedule::Range;

class UpdateShards final : public Executor {
 public:
  // Nothing may be updated before the ranks have compared their calls.
  std::optional<uint64_t> message_bytes(const Call&, const Buffers&, int, uint64_t) const override {
    return std::nullopt;
  }
  void contribute(const Call&, const Buffers&, const Mailboxes&) const override {}
  uint64_t complete(const Call&, const Buffers&, const Mailboxes&, Exchange&) const override {
    return 0;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const IeeeFloatScope ieee;
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const size_t elem_bytes = info(call.dtype).num_bytes;
    const Pieces& pieces = *buffers.pieces;
    const uint64_t round_elems = exchange.slot_bytes() / elem_bytes / kTileElems * kTileElems;
    const uint64_t num_rounds = schedule::ceil_div(pieces.longest_row(), round_elems);
    const auto chunk_of = [&](int owner, uint64_t round) {
      return schedule::chunk_of(pieces.row_elems(owner), round_elems, round);
    };
    const auto parameters_of = [&](const Pieces::Tile& tile) {
      return buffers.update->data[tile.piece] + tile.place * elem_bytes;
    };
    const OutputCopier output(call.num_bytes(), world_size);
    exchange.let_slots_change_hands();
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range own = chunk_of(rank, round);
      pieces.for_each_tile(rank, own, [&](const Pieces::Tile& tile) {
        update(call, buffers, tile, own.begin + tile.offset, parameters_of(tile));
        if (world_size == 1) return;
        copy_bytes(exchange.own_slot(round) + tile.offset * elem_bytes, parameters_of(tile),
                   tile.elems.num_elems * elem_bytes);
      });
      exchange.publish_filled(round);
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        exchange.wait_filled(owner, round, "update_shards");
        pieces.for_each_tile(owner, chunk_of(owner, round), [&](const Pieces::Tile& tile) {
          output.copy(parameters_of(tile), exchange.slot(owner, round) + tile.offset * elem_bytes,
                      tile.elems.num_elems * elem_bytes);
        });
      }
    }
    return num_rounds;
  }

 private:
  static void update(const Call& call, const Buffers& buffers, const Pieces::Tile& tile,
                     uint64_t place, std::byte* parameters) {
    const std::optional<UpdateStep>& step = buffers.update->steps[tile.piece];
    if (!step) return;
    const ElementLoops& loops = element_loops();
    const auto at = [&](float* values) {
      return values == nullptr ? nullptr : values + tile.place;
    };
    const UpdateState& state = buffers.update->states[tile.piece];
    float* wide =
        state.parameters != nullptr ? at(state.parameters) : reinterpret_cast<float*>(parameters);
    loops.update(*step,
                 {.gradients = buffers.sums + place,
                  .parameters = wide,
                  .momentum = at(state.momentum),
                  .squares = at(state.squares),
                  .largest = at(state.largest)},
                 tile.elems.num_elems);
    if (state.parameters == nullptr) return;
    loops.convert(DType::kFloat32, call.dtype)(wide, parameters, tile.elems.num_elems);
  }
};

}  // namespace

constexpr UpdateShards kUpdateShardsExecutor;
const Executor& update_shards_executor = kUpdateShardsExecutor;

}  // namespace rota::cpu
