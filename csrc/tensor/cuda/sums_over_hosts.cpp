#include "tensor/cuda/sums_over_hosts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cuda/sums.h"
#include "hosts/local_calls.h"
#include "schedule/chunk.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/native_stream.h"

namespace rota::tensors {
namespace {

using schedule::Range;

constexpr size_t kMessageGranuleBytes = 16;  // kernels want messages to start so

// As hosts/reducers.h: buckets, and what travels in scaled blocks, are summed as float32.
bool is_bucket(const Call& call) {
  return call.kind == CollectiveKind::kReduceBucket || call.wire.is_block_scaled;
}
DType accumulate_of(const Call& call) {
  return is_bucket(call) ? DType::kFloat32 : info(call.dtype).accumulate;
}

uint64_t in_tiles(uint64_t num_elems) {
  return schedule::ceil_div(num_elems, kTileElems) * kTileElems;
}

// The element work of one sum.
class LevelSums {
 public:
  LevelSums(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders, at::ScalarType type,
            at::Device device)
      : gpus_(gpus),
        call_(call),
        orders_(orders),
        accumulate_(accumulate_of(call)),
        type_(accumulate_ == call.dtype ? type : at::kFloat),
        factor_(call.kind == CollectiveKind::kReduceBucket ? call.pass.contribution_factor : 1),
        result_factor_(call.kind == CollectiveKind::kReduceBucket ? call.pass.result_factor : 1),
        device_(device) {}

  at::Tensor partials(uint64_t num_elems) const { return gpus_.empty(num_elems, type_); }
  size_t partial_bytes() const { return info(accumulate_).num_bytes; }
  // Whether a rank's elements are what its host sums.
  bool is_plain() const { return accumulate_ == call_.dtype && factor_ == 1; }
  // Whether a host's sums are what other hosts get.
  bool sends_partials() const {
    return call_.wire == WireFormat{accumulate_} && !call_.pass.has_residual;
  }
  // Whether the sums of all hosts are what the tensor gets.
  bool is_direct() const { return !is_bucket(call_) && call_.wire == WireFormat{call_.dtype}; }
  ReduceOp partial_op() const { return hosts::partial_op(call_.op); }
  OrderOptions local_order() const { return {.is_tree = orders_.local.num_shards != 0}; }

  // In the wire format.
  size_t message_bytes(uint64_t num_elems) const {
    return schedule::ceil_div(call_.wire.num_bytes(in_tiles(num_elems)), kMessageGranuleBytes) *
           kMessageGranuleBytes;
  }

  // A rank's elements, as its host sums them.
  void contribute(const void* data, uint64_t num_elems, const at::Tensor& partials) const {
    if (is_plain()) {
      copy_bytes(device_, partials.data_ptr(), data, num_elems * partial_bytes());
    } else if (num_elems > 0) {
      gpus_.pack({.dtype = call_.dtype,
                  .data = data,
                  .num_elems = num_elems,
                  .wire = {accumulate_},
                  .to = static_cast<std::byte*>(partials.data_ptr()),
                  .factor = factor_});
    }
  }

  // A host's sums, as other hosts get them.
  void encode(const void* partials, uint64_t num_elems, std::byte* message,
              float* residual = nullptr) const {
    gpus_.pack({.dtype = accumulate_,
                .data = partials,
                .num_elems = num_elems,
                .wire = call_.wire,
                .to = message,
                .result_factor = result_factor_,
                .residual = residual});
  }

  // Every message becomes the sum of the hosts'.
  void sum(const at::Tensor& messages, const RankOfEachHost& senders, uint64_t num_elems) const {
    auto* first = static_cast<std::byte*>(messages.data_ptr());
    std::vector<std::byte*> of_host;
    for (int host = 0; host < gpus_.hosts().num_hosts(); ++host) {
      of_host.push_back(first + senders.position_of(host) * message_bytes(num_elems));
    }
    gpus_.sums().run(of_host, in_tiles(num_elems), call_.wire, call_.op, call_.pass.divisor,
                     orders_.hosts);
  }

  // The sums of all hosts to the tensor. memory: of as many tiles. wire: where they lie. stats:
  // null for none.
  void decode(const BucketMemory& memory, std::byte* wire, void* data, uint64_t num_elems,
              double* stats = nullptr) const {
    const auto words = reinterpret_cast<std::byte*>(memory.words) -
                       static_cast<std::byte*>(memory.whole.data_ptr());
    memory.whole.narrow(0, words, sizeof(cuda::UnpackWords)).zero_();
    const cuda::BucketArgs bucket{.tiles = nullptr,
                                  .contiguous = {static_cast<std::byte*>(data), num_elems},
                                  .num_tiles = schedule::ceil_div(num_elems, kTileElems),
                                  .wire = wire,
                                  .contribution_factor = 1,
                                  .result_factor = result_factor_};
    cuda::launch_unpack({.bucket = bucket,
                         .squares = memory.squares,
                         .stats = stats != nullptr ? stats : memory.stats,
                         .words = memory.words},
                        call_.dtype, call_.wire, current_stream(device_));
  }

 private:
  HostGpus& gpus_;
  const Call& call_;
  const hosts::LevelOrders& orders_;
  DType accumulate_;
  at::ScalarType type_;  // of partial sums
  float factor_;
  float result_factor_;
  at::Device device_;
};

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
    if (!gpus_.is_on_rail()) return exchange(place, at::Tensor(), at::Tensor(), 0);
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
    if (!gpus_.is_on_rail()) return exchange(place, at::Tensor(), at::Tensor(), 0);
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
    gpus_.gather_rails(place.shards);
    if (!arrives_in_place(place.chunk)) take_home(place);
    place = {};
  }

 private:
  // A chunk's memory is used again three chunks later: one is contributed, one summed, one
  // collected.
  static constexpr uint64_t kNumPlaces = 3;

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
  // Of a rail that has all its elements, and of the own one.
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
                size_t own_bytes, bool are_results = false) {
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    for (uint64_t i = 0; i < num_hosts() && outgoing.defined(); ++i) {
      const auto peer = static_cast<size_t>(rail_.ascending()[i]);
      to[peer] = from[peer] = static_cast<int64_t>(own_bytes);
      (are_results ? from : to)[peer] =
          static_cast<int64_t>(sums_.message_bytes(part_of(place.chunk, own_rail(), i).num_elems));
    }
    const at::Tensor none = gpus_.bytes(0);
    place.exchange =
        gpus_.engine().start(call_.kind_name(), outgoing.defined() ? outgoing : none, std::move(to),
                             incoming.defined() ? incoming : none, std::move(from));
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
        senders_(gpus.partners()) {
    for (int local_rank = 0; local_rank < gpus.bridge().local_size(); ++local_rank) {
      receivers_.push_back(gpus.partnered(local_rank));
      most_receivers_ = std::max(most_receivers_, receivers_.back().size());
    }
    const uint64_t most_elems = kDeviceChunkBytes / sums_.partial_bytes() / num_parts();
    chunk_elems_ = std::max(most_elems / kTileElems, uint64_t{1}) * kTileElems;
  }

  void run() { run_in_steps(*this, schedule::ceil_div(call_.num_elems, chunk_elems_)); }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const uint64_t part_elems = in_tiles(range.num_elems);
    at::Tensor partials = sums_.partials(num_parts() * part_elems);
    for (size_t i = 0; i < receivers_.size(); ++i) {
      for (size_t j = 0; j < receivers_[i].size(); ++j) {
        const auto begin = static_cast<int64_t>((i * most_receivers_ + j) * part_elems);
        sums_.contribute(input_at(receivers_[i][j], range.begin), range.num_elems,
                         partials.narrow(0, begin, static_cast<int64_t>(part_elems)));
      }
    }
    if (gpus_.bridge().local_size() > 1) {
      const at::Tensor own = sums_.partials(most_receivers_ * part_elems);
      gpus_.reduce_scatter(own, partials, sums_.partial_op(), sums_.local_order());
      partials = own;
    }
    const size_t num_bytes = sums_.message_bytes(range.num_elems);
    place.messages = gpus_.bytes(num_bytes * senders_.ascending().size());
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    for (const int rank : own_receivers()) to[static_cast<size_t>(rank)] = as_split(num_bytes);
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
  static constexpr uint64_t kNumPlaces = 3;

  struct Place {
    at::Tensor messages;
    DeviceEngine::Exchange exchange;
  };

  static int64_t as_split(size_t num_bytes) { return static_cast<int64_t>(num_bytes); }
  uint64_t num_parts() const { return receivers_.size() * most_receivers_; }
  const std::vector<int>& own_receivers() const {
    return receivers_[static_cast<size_t>(gpus_.bridge().local_rank())];
  }
  Range range_of(uint64_t index) const {
    return schedule::chunk_of(call_.num_elems, chunk_elems_, index);
  }
  const void* input_at(int rank, uint64_t elem) const {
    return static_cast<const std::byte*>(buffers_.inputs[rank].data) +
           elem * info(call_.dtype).num_bytes;
  }

  at::Tensor messages(const at::Tensor& partials, const Range& range) const {
    const size_t num_bytes = sums_.message_bytes(range.num_elems);
    const size_t num_receivers = own_receivers().size();
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
  std::vector<std::vector<int>> receivers_;  // of what each rank of this host sums
  size_t most_receivers_ = 0;
  uint64_t chunk_elems_;
  std::array<Place, kNumPlaces> places_;
};

}  // namespace

bool sums_on_gpus(const Call& call, const schedule::Hosts& hosts) {
  if (call.uneven != 0 || call.pass.stochastic_seed) return false;
  if (call.order.num_shards != 0) {
    for (int host = 0; host < hosts.num_hosts(); ++host) {
      if (hosts.local_size(host) > cuda::kMostTreeRanks) return false;
    }
  }
  const DType accumulate = accumulate_of(call);
  const bool is_widened = accumulate != call.dtype;
  const bool is_narrowed = call.wire != WireFormat{accumulate};
  if ((is_widened || is_bucket(call)) && !is_bucket_dtype(call.dtype)) return false;
  if (is_bucket(call)) return true;
  // pack rounds float64 by way of float32.
  return !is_narrowed || (is_wire_dtype(call.wire.dtype) && is_bucket_dtype(accumulate) &&
                          (accumulate == DType::kFloat32 || call.wire.dtype == DType::kFloat32));
}

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
