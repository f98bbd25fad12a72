// Halves of a bucket's all-reduce around an update: owners get the sums of their pieces, update the
// parameters there, and all ranks get those.
#include <numeric>

#include "check.h"
#include "cpu/element_loops.h"
#include "ranks.h"
#include "schedule/pieces.h"

namespace rota::test {
namespace {

// Of one tile for each of 4 other ranks.
constexpr transport::Geometry kShortSlots{
    .message_bytes = 1024, .slot_bytes = 8448, .num_cells = 8, .cell_bytes = 1024};

float contribution(int rank, uint64_t elem, uint64_t seed) {
  return static_cast<float>((3 * elem + 5 * static_cast<uint64_t>(rank) + seed) % 17) - 8;
}

// Parameters of these lengths, each cut into runs of `run` elements that the ranks own in turn.
schedule::Pieces make_pieces(const std::vector<uint64_t>& lengths, uint64_t run, int world_size) {
  std::vector<schedule::Piece> pieces;
  uint64_t begin = 0;
  for (const uint64_t length : lengths) {
    for (uint64_t place = 0; place < length; place += run) {
      const uint64_t num_elems = schedule::min_of(run, length - place);
      pieces.push_back({.begin = begin + place,
                        .num_elems = num_elems,
                        .owner = static_cast<int>(pieces.size()) % world_size,
                        .first_tile = (begin + place) / kTileElems});
    }
    begin += length;
  }
  return {std::move(pieces), world_size};
}

// The update adds the sums to the parameters.
void reduce_and_update(Communicator& communicator, const schedule::Pieces& pieces,
                       const WireFormat& wire, uint64_t seed) {
  const int rank = communicator.rank();
  std::vector<float> bucket(pieces.num_elems()), parameters(pieces.num_elems(), 1.0f);
  for (uint64_t i = 0; i < bucket.size(); ++i) bucket[i] = contribution(rank, i, seed);
  std::vector<float> sums(pieces.row_elems(rank));
  cpu::BucketMeasures measures(sums.size());
  const Call reduce{.kind = CollectiveKind::kReduceShards,
                    .op = ReduceOp::kAvg,
                    .dtype = DType::kFloat32,
                    .wire = wire,
                    .hop = DType::kFloat32,
                    .num_elems = bucket.size(),
                    .uneven = pieces.digest()};
  communicator.run(
      reduce,
      {.data = bucket.data(), .measures = &measures, .pieces = &pieces, .sums = sums.data()},
      CallerThread::kUser);
  double squares = 0;
  for (const float sum : sums) squares += static_cast<double>(sum) * sum;
  check_equal(std::accumulate(measures.squares.begin(), measures.squares.end(), 0.0), squares,
              "the squares of exact sums");

  cpu::ShardUpdate update;
  for (const schedule::Piece& piece : pieces.all()) {
    update.data.push_back(reinterpret_cast<std::byte*>(&parameters[piece.begin]));
    update.states.push_back({});
    update.steps.push_back(cpu::UpdateStep{
        .kind = cpu::UpdateStep::Kind::kSgd, .gradient_factor = -1, .size = 1, .fresh = 1});
  }
  const Call gather{.kind = CollectiveKind::kUpdateShards,
                    .dtype = DType::kFloat32,
                    .num_elems = bucket.size(),
                    .uneven = pieces.digest()};
  communicator.run(gather, {.pieces = &pieces, .sums = sums.data(), .update = &update},
                   CallerThread::kUser);
  for (uint64_t i = 0; i < parameters.size(); ++i) {
    float expected = 1;
    for (int peer = 0; peer < communicator.world_size(); ++peer) {
      expected += contribution(peer, i, seed);
    }
    check_equal(parameters[i], expected, "a parameter");
  }
}

void all_get_what_owners_update(int world_size) {
  const std::vector<std::vector<uint64_t>> lists{
      {1}, {3, 1, 70}, {5000}, {700, 20000, 1, 513, 512, 4096}};
  run_ranks(world_size,
            [&](Communicator& communicator) {
              uint64_t seed = 0;
              for (int turn = 0; turn < 3; ++turn) {
                for (const std::vector<uint64_t>& lengths : lists) {
                  for (const uint64_t run : {kTileElems, 3 * kTileElems}) {
                    const schedule::Pieces pieces = make_pieces(lengths, run, world_size);
                    for (const WireFormat& wire :
                         {WireFormat{DType::kFloat32}, WireFormat{DType::kFloat16, true}}) {
                      reduce_and_update(communicator, pieces, wire, ++seed);
                    }
                  }
                }
              }
            },
            {.geometry = kShortSlots});
}

const CaseTable kCases{
    {"shards-ws1", all_get_what_owners_update, 1},
    {"shards-ws2", all_get_what_owners_update, 2},
    {"shards-ws3", all_get_what_owners_update, 3},
    {"shards-ws5", all_get_what_owners_update, 5},
};

}  // namespace
}  // namespace rota::test
