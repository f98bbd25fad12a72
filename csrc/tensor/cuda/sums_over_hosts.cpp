#include "tensor/cuda/sums_over_hosts.h"

#include "schedule/levels.h"
#include "tensor/cuda/level_sums.h"

namespace rota::tensors {
namespace {

using schedule::kNumPlaces;
using schedule::Range;

// ---- all_reduce ---------------------------------------------------------------------------------

// The ranks of a host reduce-scatter the shards, those of a rail exchange the parts, sum them and
// exchange the sums, and those of a host gather the shards. Between the ranks of a host all shards
// are as long as the longest.
class AllReduce {
 public:
  AllReduce(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
            const at::Tensor& tensor, float* residual, double* stats)
      : gpus_(gpus),
        call_(call),
        sums_(gpus, call, orders, tensor.scalar_type()),
        tensor_(tensor),
        residual_(residual),
        stats_(stats),
        rail_(gpus.is_on_rail() ? gpus.rail() : gpus.partners()),
        levels_{gpus.num_rails(), gpus.hosts().num_hosts(), kTileElems} {
    const auto num_parts = static_cast<uint64_t>(levels_.num_rails * levels_.num_groups);
    const uint64_t most_parts = kDeviceChunkBytes / sums_.partial_bytes() / num_parts;
    chunk_elems_ = std::max(most_parts / kTileElems, uint64_t{1}) * kTileElems * num_parts;
    if (!sums_.is_direct()) {
      memory_.emplace(gpus.device(), schedule::ceil_div(call.num_elems, kTileElems), call.wire);
    }
  }

  void run() {
    schedule::run_in_steps(*this, schedule::ceil_div(call_.num_elems, chunk_elems_));
    if (!memory_) return;
    sums_.decode(*memory_, memory_->wire, tensor_.data_ptr(), call_.num_elems, stats_);
  }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    place = {schedule::chunk_of(call_.num_elems, chunk_elems_, index)};
    const at::Tensor partials = sum_locally(place.chunk, contribution(place.chunk));
    if (!gpus_.is_on_rail()) return exchange_nothing(place);
    const size_t own_bytes = sums_.message_bytes(own_part(place.chunk).num_elems);
    place.messages = gpus_.bytes(own_bytes * static_cast<size_t>(levels_.num_groups));
    exchange(place, messages(place.chunk, partials), place.messages, own_bytes,
             /*are_results=*/false);
  }

  void reduce(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range& chunk = place.chunk;
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    place.shards = destination(chunk);
    if (!gpus_.is_on_rail()) return exchange_nothing(place);
    const Range own = own_part(chunk);
    if (own.num_elems > 0) sums_.sum(place.messages, rail_, own.num_elems);
    const at::Tensor shard = place.shards.narrow(
        0, gpus_.bridge().local_rank() * shard_bytes(chunk, 0), shard_bytes(chunk, own_rail()));
    exchange(place, place.messages, shard, sums_.message_bytes(own.num_elems),
             /*are_results=*/true);
  }

  void collect(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    gpus_.gather_rails(place.shards, call_.dtype);
    if (!arrives_in_place(place.chunk)) take_home(place);
    place = {};
  }

 private:
  struct Place {
    Range chunk{0, 0};
    at::Tensor messages;  // of the rail, to the own part
    at::Tensor shards;    // of all rails: the results
    DeviceEngine::Exchange exchange;
  };

  int own_rail() const { return gpus_.bridge().local_rank(); }
  Range own_shard(const Range& chunk) const { return levels_.shard_of(chunk, own_rail()); }
  // A part belongs to the rank at that position of its rail.
  Range own_part(const Range& chunk) const {
    const size_t position = rail_.position_of(gpus_.bridge().host());
    return levels_.part_of(own_shard(chunk), static_cast<int>(position));
  }
  uint64_t padded_elems(const Range& chunk) const {
    return static_cast<uint64_t>(levels_.num_rails) * levels_.longest_shard(chunk);
  }
  // Of the messages of a rail's shard. The first shard is the longest.
  int64_t shard_bytes(const Range& chunk, int rail) const {
    size_t num_bytes = 0;
    levels_.for_each_part(levels_.shard_of(chunk, rail), [&](int, const Range& part) {
      num_bytes += sums_.message_bytes(part.num_elems);
    });
    return static_cast<int64_t>(num_bytes);
  }

  at::Tensor contribution(const Range& chunk) const {
    const bool is_whole = chunk.num_elems == padded_elems(chunk);
    // Sums of unequal hosts overwrite it.
    if (sums_.is_plain() && is_whole && gpus_.are_all_on_rails()) {
      return tensor_.narrow(0, static_cast<int64_t>(chunk.begin),
                            static_cast<int64_t>(chunk.num_elems));
    }
    const at::Tensor copy = sums_.partials(padded_elems(chunk));
    sums_.contribute(data_at(chunk.begin), chunk.num_elems, copy);
    return copy;
  }

  // The host's sum of the own shard; meaningless on a rank that is on no rail.
  at::Tensor sum_locally(const Range& chunk, const at::Tensor& contribution) const {
    if (gpus_.bridge().local_size() == 1) return contribution;
    const uint64_t shard_elems = levels_.longest_shard(chunk);
    if (gpus_.are_all_on_rails()) {
      const at::Tensor shard = sums_.partials(shard_elems);
      gpus_.reduce_scatter(shard, contribution, sums_.partial_op(), sums_.local_order());
      return shard;
    }
    gpus_.all_reduce(contribution, sums_.partial_op(), sums_.local_order());
    if (!gpus_.is_on_rail()) return contribution;
    return contribution.narrow(0, own_rail() * static_cast<int64_t>(shard_elems),
                               static_cast<int64_t>(shard_elems));
  }

  // What the ranks of the rail get, of the own shard's sums.
  at::Tensor messages(const Range& chunk, const at::Tensor& partials) const {
    const int64_t num_bytes = shard_bytes(chunk, own_rail());
    if (sums_.sends_partials()) return partials.view(at::kByte).narrow(0, 0, num_bytes);
    const at::Tensor encoded = gpus_.bytes(static_cast<uint64_t>(num_bytes));
    auto* message = static_cast<std::byte*>(encoded.data_ptr());
    const auto* sums = static_cast<const std::byte*>(partials.data_ptr());
    const Range shard = own_shard(chunk);
    levels_.for_each_part(shard, [&](int, const Range& part) {
      if (part.num_elems == 0) return;
      sums_.encode(sums + (part.begin - shard.begin) * sums_.partial_bytes(), part.num_elems,
                   message, residual_ == nullptr ? nullptr : residual_ + part.begin);
      message += sums_.message_bytes(part.num_elems);
    });
    return encoded;
  }

  // own_bytes: of the own part. Contributions are of the receiver's part, results of the sender's.
  void exchange(Place& place, const at::Tensor& outgoing, const at::Tensor& incoming,
                size_t own_bytes, bool are_results) {
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    levels_.for_each_part(own_shard(place.chunk), [&](int position, const Range& part) {
      const auto peer = static_cast<size_t>(rail_.ascending()[static_cast<size_t>(position)]);
      to[peer] = from[peer] = static_cast<int64_t>(own_bytes);
      (are_results ? from : to)[peer] = static_cast<int64_t>(sums_.message_bytes(part.num_elems));
    });
    place.exchange =
        gpus_.engine().start(call_.kind_name(), outgoing, std::move(to), incoming, std::move(from));
  }
  // A rank's that is on no rail: every rank takes part in each exchange.
  void exchange_nothing(Place& place) {
    const at::Tensor none = gpus_.bytes(0);
    const DeviceEngine::Splits no_splits = gpus_.engine().no_splits();
    place.exchange = gpus_.engine().start(call_.kind_name(), none, no_splits, none, no_splits);
  }

  // Whether the shards lie in their place without gaps.
  bool arrives_in_place(const Range& chunk) const {
    return !call_.wire.is_block_scaled && chunk.num_elems == padded_elems(chunk);
  }
  at::Tensor home() const { return memory_ ? memory_->whole : tensor_.view(at::kByte); }
  at::Tensor destination(const Range& chunk) const {
    const int64_t num_bytes = levels_.num_rails * shard_bytes(chunk, 0);
    if (!arrives_in_place(chunk)) return gpus_.bytes(static_cast<uint64_t>(num_bytes));
    return home().narrow(0, static_cast<int64_t>(call_.wire.payload_bytes(chunk.begin)), num_bytes);
  }

  // Results that have not arrived in their place.
  void take_home(const Place& place) const {
    const Range& chunk = place.chunk;
    auto* shards = static_cast<std::byte*>(place.shards.data_ptr());
    auto* begin = static_cast<std::byte*>(home().data_ptr());
    if (!call_.wire.is_block_scaled) {
      return gpus_.copy(begin + call_.wire.payload_bytes(chunk.begin), shards,
                        call_.wire.payload_bytes(chunk.num_elems));
    }
    const WirePlace all = call_.wire.place(begin, in_tiles(call_.num_elems));
    for (int rail = 0; rail < levels_.num_rails; ++rail) {
      std::byte* message = shards + rail * shard_bytes(chunk, 0);
      levels_.for_each_part(levels_.shard_of(chunk, rail), [&](int, const Range& part) {
        const uint64_t num_elems = in_tiles(part.num_elems);
        const WirePlace to = call_.wire.from(all, part.begin);
        const WirePlace from = call_.wire.place(message, num_elems);
        gpus_.copy(to.payload, from.payload, call_.wire.payload_bytes(num_elems));
        gpus_.copy(to.scales, from.scales, call_.wire.num_scales(num_elems));
        message += sums_.message_bytes(part.num_elems);
      });
    }
  }

  const std::byte* data_at(uint64_t elem) const {
    return static_cast<const std::byte*>(tensor_.data_ptr()) + elem * info(call_.dtype).num_bytes;
  }

  HostGpus& gpus_;
  const Call& call_;
  const LevelSums sums_;
  const at::Tensor tensor_;
  float* residual_;
  double* stats_;
  const RankOfEachHost rail_;
  const schedule::Levels levels_;
  uint64_t chunk_elems_;
  std::optional<BucketMemory> memory_;  // unless results are the tensor's bits
  std::array<Place, kNumPlaces> places_;
};

// ---- reduce_scatter -----------------------------------------------------------------------------

// The ranks of a host reduce-scatter what its own ranks and those that they are partners of get;
// each sends its sums on, and sums what its own partners send.
class ReduceScatter {
 public:
  ReduceScatter(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                const cpu::Buffers& buffers, at::ScalarType type)
      : gpus_(gpus),
        call_(call),
        sums_(gpus, call, orders, type),
        buffers_(buffers),
        senders_(gpus.partners()),
        receivers_(gpus.bridge()) {
    const uint64_t most_elems = kDeviceChunkBytes / sums_.partial_bytes() / receivers_.num_places();
    chunk_elems_ = std::max(most_elems / kTileElems, uint64_t{1}) * kTileElems;
  }

  void run() { schedule::run_in_steps(*this, schedule::ceil_div(call_.num_elems, chunk_elems_)); }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const uint64_t part_elems = in_tiles(range.num_elems);
    at::Tensor partials = sums_.partials(receivers_.num_places() * part_elems);
    for (size_t i = 0; i < receivers_.num_local(); ++i) {
      for (size_t j = 0; j < receivers_.of(i).size(); ++j) {
        const auto begin = static_cast<int64_t>(receivers_.place(i, j) * part_elems);
        sums_.contribute(input_at(receivers_.of(i)[j], range.begin), range.num_elems,
                         partials.narrow(0, begin, static_cast<int64_t>(part_elems)));
      }
    }
    if (gpus_.bridge().local_size() > 1) {
      const at::Tensor own = sums_.partials(receivers_.places_of_each() * part_elems);
      gpus_.reduce_scatter(own, partials, sums_.partial_op(), sums_.local_order());
      partials = own;
    }
    const size_t num_bytes = sums_.message_bytes(range.num_elems);
    place.messages = gpus_.bytes(num_bytes * senders_.ascending().size());
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    for (const int rank : receivers_.own()) to[static_cast<size_t>(rank)] = as_split(num_bytes);
    for (const int rank : senders_.ascending()) {
      from[static_cast<size_t>(rank)] = as_split(num_bytes);
    }
    place.exchange = gpus_.engine().start(call_.kind_name(), messages(partials, range),
                                          std::move(to), place.messages, std::move(from));
  }

  void reduce(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    sums_.sum(place.messages, senders_, range_of(index).num_elems);
  }

  void collect(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const size_t elem_bytes = info(call_.dtype).num_bytes;
    auto* sums = static_cast<std::byte*>(place.messages.data_ptr());
    auto* output = static_cast<std::byte*>(buffers_.outputs[0].data) + range.begin * elem_bytes;
    if (sums_.is_direct()) {
      gpus_.copy(output, sums, range.num_elems * elem_bytes);
    } else {
      const BucketMemory memory(gpus_.device(), schedule::ceil_div(range.num_elems, kTileElems),
                                call_.wire);
      sums_.decode(memory, sums, output, range.num_elems);
    }
    place = {};
  }

 private:
  struct Place {
    at::Tensor messages;
    DeviceEngine::Exchange exchange;
  };

  static int64_t as_split(size_t num_bytes) { return static_cast<int64_t>(num_bytes); }
  Range range_of(uint64_t index) const {
    return schedule::chunk_of(call_.num_elems, chunk_elems_, index);
  }
  const void* input_at(int rank, uint64_t elem) const {
    return static_cast<const std::byte*>(buffers_.inputs[rank].data) +
           elem * info(call_.dtype).num_bytes;
  }

  at::Tensor messages(const at::Tensor& partials, const Range& range) const {
    const size_t num_bytes = sums_.message_bytes(range.num_elems);
    const size_t num_receivers = receivers_.own().size();
    if (sums_.sends_partials()) {
      return partials.view(at::kByte).narrow(0, 0, as_split(num_receivers * num_bytes));
    }
    const at::Tensor encoded = gpus_.bytes(num_receivers * num_bytes);
    auto* message = static_cast<std::byte*>(encoded.data_ptr());
    const auto* sums = static_cast<const std::byte*>(partials.data_ptr());
    for (size_t i = 0; i < num_receivers; ++i) {
      sums_.encode(sums + i * in_tiles(range.num_elems) * sums_.partial_bytes(), range.num_elems,
                   message + i * num_bytes);
    }
    return encoded;
  }

  HostGpus& gpus_;
  const Call& call_;
  const LevelSums sums_;
  const cpu::Buffers& buffers_;
  const RankOfEachHost senders_;
  const Partnered receivers_;  // of what each rank of this host sums
  uint64_t chunk_elems_;
  std::array<Place, kNumPlaces> places_;
};

}  // namespace

void all_reduce_over_hosts(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                           const at::Tensor& tensor, float* residual, double* stats) {
  AllReduce(gpus, call, orders, tensor, residual, stats).run();
}

void reduce_scatter_over_hosts(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                               const cpu::Buffers& buffers, at::ScalarType type) {
  ReduceScatter(gpus, call, orders, buffers, type).run();
}

}  // namespace rota::tensors
