#include "tensor/cuda/sums_over_hosts.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "schedule/chunk.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/level_sums.h"

namespace rota::tensors {
namespace {

using schedule::Range;

// ---- all_reduce ---------------------------------------------------------------------------------

// A chunk is cut into a shard for each rail, and a shard into a part for each host. The ranks of a
// host reduce-scatter the shards, those of a rail exchange the parts, sum them and exchange the
// sums, and those of a host gather the shards.
class AllReduce {
 public:
  AllReduce(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
            const at::Tensor& tensor, float* residual, double* stats)
      : gpus_(gpus),
        call_(call),
        sums_(gpus, call, orders, tensor.scalar_type(), tensor.device()),
        tensor_(tensor),
        residual_(residual),
        stats_(stats),
        rail_(gpus.is_on_rail() ? gpus.rail() : gpus.partners()) {
    const uint64_t most_parts = kDeviceChunkBytes / sums_.partial_bytes() / num_parts();
    chunk_elems_ = std::max(most_parts / kTileElems, uint64_t{1}) * kTileElems * num_parts();
    if (!sums_.is_direct()) {
      memory_.emplace(tensor.device(), schedule::ceil_div(call.num_elems, kTileElems), call.wire);
    }
  }

  void run() {
    run_in_steps(*this, schedule::ceil_div(call_.num_elems, chunk_elems_));
    if (!memory_) return;
    sums_.decode(*memory_, memory_->wire, tensor_.data_ptr(), call_.num_elems, stats_);
  }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    place = {chunk_at(index)};
    const at::Tensor partials = sum_locally(place.chunk, contribution(place.chunk));
    if (!gpus_.is_on_rail()) return exchange_nothing(place);
    const size_t own_bytes = sums_.message_bytes(own_part(place.chunk).num_elems);
    place.messages = gpus_.bytes(own_bytes * num_hosts());
    exchange(place, messages(place.chunk, partials), place.messages, own_bytes,
             /*are_results=*/false);
  }

  void reduce(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Chunk& chunk = place.chunk;
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    place.shards = destination(chunk);
    if (!gpus_.is_on_rail()) return exchange_nothing(place);
    const Range own = own_part(chunk);
    if (own.num_elems > 0) sums_.sum(place.messages, rail_, own.num_elems);
    const at::Tensor shard = place.shards.narrow(
        0, gpus_.bridge().local_rank() * static_cast<int64_t>(shard_bytes(chunk)),
        static_cast<int64_t>(own_shard_bytes(chunk)));
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
  struct Chunk {
    Range range{0, 0};
    uint64_t part_elems = 0;  // of each part but the last ones; whole tiles
  };
  struct Place {
    Chunk chunk;
    at::Tensor messages;  // of the rail, to the own part
    at::Tensor shards;    // of all rails: the results
    DeviceEngine::Exchange exchange;
  };

  uint64_t num_hosts() const { return static_cast<uint64_t>(gpus_.hosts().num_hosts()); }
  uint64_t num_parts() const { return static_cast<uint64_t>(gpus_.num_rails()) * num_hosts(); }
  uint64_t own_rail() const { return static_cast<uint64_t>(gpus_.bridge().local_rank()); }

  Chunk chunk_at(uint64_t index) const {
    const Range range = schedule::chunk_of(call_.num_elems, chunk_elems_, index);
    return {range, schedule::shard_length(range.num_elems, num_parts(), kTileElems)};
  }
  uint64_t padded_elems(const Chunk& chunk) const { return num_parts() * chunk.part_elems; }
  // The part of a rail's shard that its rank at this position owns.
  Range part_of(const Chunk& chunk, uint64_t rail, uint64_t position) const {
    const Range part =
        schedule::chunk_of(chunk.range.num_elems, chunk.part_elems, rail * num_hosts() + position);
    return {chunk.range.begin + part.begin, part.num_elems};
  }
  Range own_part(const Chunk& chunk) const {
    return part_of(chunk, own_rail(), rail_.position_of(gpus_.bridge().host()));
  }
  // The bytes of the shard of a rail that has all its elements, and of the own one.
  size_t shard_bytes(const Chunk& chunk) const {
    return num_hosts() * sums_.message_bytes(chunk.part_elems);
  }
  size_t own_shard_bytes(const Chunk& chunk) const {
    size_t num_bytes = 0;
    for (uint64_t i = 0; i < num_hosts(); ++i) {
      num_bytes += sums_.message_bytes(part_of(chunk, own_rail(), i).num_elems);
    }
    return num_bytes;
  }

  at::Tensor contribution(const Chunk& chunk) const {
    const bool is_whole = chunk.range.num_elems == padded_elems(chunk);
    // Sums of unequal hosts overwrite it.
    if (sums_.is_plain() && is_whole && gpus_.are_all_on_rails()) {
      return tensor_.narrow(0, static_cast<int64_t>(chunk.range.begin),
                            static_cast<int64_t>(chunk.range.num_elems));
    }
    const at::Tensor copy = sums_.partials(padded_elems(chunk));
    sums_.contribute(data_at(chunk.range.begin), chunk.range.num_elems, copy);
    return copy;
  }

  // The host's sum of the own shard; meaningless on a rank that is on no rail.
  at::Tensor sum_locally(const Chunk& chunk, const at::Tensor& contribution) const {
    if (gpus_.bridge().local_size() == 1) return contribution;
    const uint64_t shard_elems = num_hosts() * chunk.part_elems;
    if (gpus_.are_all_on_rails()) {
      const at::Tensor shard = sums_.partials(shard_elems);
      gpus_.reduce_scatter(shard, contribution, sums_.partial_op(), sums_.local_order());
      return shard;
    }
    gpus_.all_reduce(contribution, sums_.partial_op(), sums_.local_order());
    if (!gpus_.is_on_rail()) return contribution;
    return contribution.narrow(0, static_cast<int64_t>(own_rail() * shard_elems),
                               static_cast<int64_t>(shard_elems));
  }

  // What the ranks of the rail get, of the own shard's sums.
  at::Tensor messages(const Chunk& chunk, const at::Tensor& partials) const {
    const auto num_bytes = static_cast<int64_t>(own_shard_bytes(chunk));
    if (sums_.sends_partials()) return partials.view(at::kByte).narrow(0, 0, num_bytes);
    const at::Tensor encoded = gpus_.bytes(own_shard_bytes(chunk));
    auto* message = static_cast<std::byte*>(encoded.data_ptr());
    const auto* sums = static_cast<const std::byte*>(partials.data_ptr());
    for (uint64_t i = 0; i < num_hosts(); ++i) {
      const Range part = part_of(chunk, own_rail(), i);
      if (part.num_elems == 0) break;
      sums_.encode(sums + i * chunk.part_elems * sums_.partial_bytes(), part.num_elems, message,
                   residual_ == nullptr ? nullptr : residual_ + part.begin);
      message += sums_.message_bytes(part.num_elems);
    }
    return encoded;
  }

  // own_bytes: of the own part. Contributions are of the receiver's part, results of the sender's.
  void exchange(Place& place, const at::Tensor& outgoing, const at::Tensor& incoming,
                size_t own_bytes, bool are_results) {
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    for (uint64_t i = 0; i < num_hosts(); ++i) {
      const auto peer = static_cast<size_t>(rail_.ascending()[i]);
      to[peer] = from[peer] = static_cast<int64_t>(own_bytes);
      (are_results ? from : to)[peer] =
          static_cast<int64_t>(sums_.message_bytes(part_of(place.chunk, own_rail(), i).num_elems));
    }
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
  bool arrives_in_place(const Chunk& chunk) const {
    return !call_.wire.is_block_scaled && chunk.range.num_elems == padded_elems(chunk);
  }
  at::Tensor home() const { return memory_ ? memory_->whole : tensor_.view(at::kByte); }
  at::Tensor destination(const Chunk& chunk) const {
    const size_t num_bytes = static_cast<size_t>(gpus_.num_rails()) * shard_bytes(chunk);
    if (!arrives_in_place(chunk)) return gpus_.bytes(num_bytes);
    return home().narrow(0, static_cast<int64_t>(call_.wire.payload_bytes(chunk.range.begin)),
                         static_cast<int64_t>(num_bytes));
  }

  // Results that have not arrived in their place.
  void take_home(const Place& place) const {
    const Chunk& chunk = place.chunk;
    auto* shards = static_cast<std::byte*>(place.shards.data_ptr());
    auto* begin = static_cast<std::byte*>(home().data_ptr());
    if (!call_.wire.is_block_scaled) {
      return copy_bytes(tensor_.device(), begin + call_.wire.payload_bytes(chunk.range.begin),
                        shards, call_.wire.payload_bytes(chunk.range.num_elems));
    }
    const WirePlace all = call_.wire.place(begin, in_tiles(call_.num_elems));
    for (uint64_t i = 0; i < num_parts(); ++i) {
      const Range part = part_of(chunk, i / num_hosts(), i % num_hosts());
      const uint64_t num_elems = in_tiles(part.num_elems);
      const WirePlace to = call_.wire.from(all, part.begin);
      const WirePlace from =
          call_.wire.place(shards + i * sums_.message_bytes(chunk.part_elems), num_elems);
      copy_bytes(tensor_.device(), to.payload, from.payload, call_.wire.payload_bytes(num_elems));
      copy_bytes(tensor_.device(), to.scales, from.scales, call_.wire.num_scales(num_elems));
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
                const cpu::Buffers& buffers, at::ScalarType type, at::Device device)
      : gpus_(gpus),
        call_(call),
        sums_(gpus, call, orders, type, device),
        buffers_(buffers),
        device_(device),
        senders_(gpus.partners()),
        receivers_(gpus.bridge()) {
    const uint64_t most_elems = kDeviceChunkBytes / sums_.partial_bytes() / receivers_.num_places();
    chunk_elems_ = std::max(most_elems / kTileElems, uint64_t{1}) * kTileElems;
  }

  void run() { run_in_steps(*this, schedule::ceil_div(call_.num_elems, chunk_elems_)); }

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
      copy_bytes(device_, output, sums, range.num_elems * elem_bytes);
    } else {
      const BucketMemory memory(device_, schedule::ceil_div(range.num_elems, kTileElems),
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
  at::Device device_;
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
                               const cpu::Buffers& buffers, at::ScalarType type,
                               at::Device device) {
  ReduceScatter(gpus, call, orders, buffers, type, device).run();
}

}  // namespace rota::tensors
