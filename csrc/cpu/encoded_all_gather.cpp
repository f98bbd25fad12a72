// All-gather in a wire format: each rank encodes its part once, and every rank, the owner included,
// decodes the same bytes, so all of them hold the same values. Scaled blocks count from the start
// of each part.
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "cpu/part_codec.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

class EncodedAllGather final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    return call.wire.num_bytes(longest_elems(call, buffers, world_size));
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const IeeeFloatScope ieee;
    encode_part(call, *buffers.inputs, whole(*buffers.inputs), mailboxes.own());
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const IeeeFloatScope ieee;
    for (int owner = 0; owner < mailboxes.world_size(); ++owner) {
      const Part& output = buffers.outputs[owner];
      decode_part(call, mailboxes.of(owner), output, whole(output));
    }
    return 0;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const IeeeFloatScope ieee;
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const uint64_t round_elems = call.wire.capacity(exchange.slot_bytes(), kTileElems);
    const uint64_t num_rounds =
        schedule::ceil_div(longest_elems(call, buffers, world_size), round_elems);
    const auto chunk_of = [&](const Part& part, uint64_t round) {
      return schedule::chunk_of(part.num_elems, round_elems, round);
    };
    exchange.let_slots_change_hands();
    for (uint64_t round = 0; round < num_rounds; ++round) {
      const Range own = chunk_of(*buffers.inputs, round);
      encode_part(call, *buffers.inputs, own, exchange.own_slot(round));
      exchange.publish_filled(round);
      decode_part(call, exchange.own_slot(round), buffers.outputs[rank], own);
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        const Part& output = buffers.outputs[owner];
        exchange.wait_filled(owner, round, "all_gather decode");
        decode_part(call, exchange.slot(owner, round), output, chunk_of(output, round));
      }
    }
    return num_rounds;
  }

 private:
  static Range whole(const Part& part) { return {0, part.num_elems}; }
  static uint64_t longest_elems(const Call& call, const Buffers& buffers, int world_size) {
    return longest_of(call, buffers.outputs, world_size) / info(call.dtype).num_bytes;
  }
};

}  // namespace

constexpr EncodedAllGather kEncodedAllGatherExecutor;
const Executor& encoded_all_gather_executor = kEncodedAllGatherExecutor;

}  // namespace rota::cpu
