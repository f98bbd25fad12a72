#include "tensor/cuda/copies_over_hosts.h"

#include "schedule/levels.h"

namespace rota::tensors {
namespace {

using schedule::kNumPlaces;
using schedule::Range;

constexpr uint64_t kGranuleBytes = 16;

uint64_t chunk_bytes(uint64_t num_parts) {
  return std::max(kDeviceChunkBytes / num_parts / kGranuleBytes, uint64_t{1}) * kGranuleBytes;
}

at::Tensor part_of(const at::Tensor& bytes, uint64_t begin, uint64_t num_bytes) {
  return bytes.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(num_bytes));
}

// `num` copies of the same bytes, one after another.
at::Tensor repeated(const HostGpus& gpus, const void* data, uint64_t num_bytes, uint64_t num) {
  const at::Tensor copies = gpus.bytes(num_bytes * num);
  for (uint64_t i = 0; i < num; ++i) {
    gpus.copy(static_cast<std::byte*>(copies.data_ptr()) + i * num_bytes, data, num_bytes);
  }
  return copies;
}

// Each rank sends its part to its partner on each other host; then the ranks of a host gather what
// they have got.
class AllGather {
 public:
  AllGather(HostGpus& gpus, const Call& call, const cpu::Buffers& buffers)
      : gpus_(gpus),
        call_(call),
        buffers_(buffers),
        receivers_(gpus.partners()),
        senders_(gpus.bridge()),
        chunk_bytes_(chunk_bytes(senders_.num_places())) {}

  void run() { schedule::run_in_steps(*this, schedule::ceil_div(call_.num_bytes(), chunk_bytes_)); }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const std::vector<int>& senders = senders_.own();
    place.parts = gpus_.bytes(senders_.num_places() * range.num_elems);
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    for (const int rank : receivers_.ascending()) to[static_cast<size_t>(rank)] = split(range);
    for (const int rank : senders) from[static_cast<size_t>(rank)] = split(range);
    const auto* own = static_cast<const std::byte*>(buffers_.inputs[0].data) + range.begin;
    place.exchange = gpus_.engine().start(
        call_.kind_name(), repeated(gpus_, own, range.num_elems, receivers_.ascending().size()),
        std::move(to),
        part_of(place.parts, senders_.place(own_place(), 0) * range.num_elems,
                senders.size() * range.num_elems),
        std::move(from));
  }

  void reduce(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    if (senders_.num_local() > 1) gpus_.all_gather(place.parts, call_.dtype);
  }

  void collect(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const auto* parts = static_cast<const std::byte*>(place.parts.data_ptr());
    for (size_t i = 0; i < senders_.num_local(); ++i) {
      for (size_t j = 0; j < senders_.of(i).size(); ++j) {
        auto* output = static_cast<std::byte*>(buffers_.outputs[senders_.of(i)[j]].data);
        gpus_.copy(output + range.begin, parts + senders_.place(i, j) * range.num_elems,
                   range.num_elems);
      }
    }
    place = {};
  }

 private:
  struct Place {
    at::Tensor parts;
    DeviceEngine::Exchange exchange;
  };

  size_t own_place() const { return static_cast<size_t>(gpus_.bridge().local_rank()); }
  static int64_t split(const Range& range) { return static_cast<int64_t>(range.num_elems); }
  // A chunk's range in each part, in bytes.
  Range range_of(uint64_t index) const {
    return schedule::chunk_of(call_.num_bytes(), chunk_bytes_, index);
  }

  HostGpus& gpus_;
  const Call& call_;
  const cpu::Buffers& buffers_;
  const RankOfEachHost receivers_;
  const Partnered senders_;  // to each rank of this host
  uint64_t chunk_bytes_;
  std::array<Place, kNumPlaces> places_;
};

// The root's host shares a chunk; each rail carries its shard of it to the other hosts, whose ranks
// gather the shards.
class Broadcast {
 public:
  Broadcast(HostGpus& gpus, const Call& call, const at::Tensor& bytes)
      : gpus_(gpus),
        call_(call),
        bytes_(bytes),
        root_(gpus.hosts().place_of(call.root)),
        is_of_root_(gpus.bridge().host() == root_.host),
        chunk_bytes_(chunk_bytes(num_rails()) * num_rails()) {}

  void run() { schedule::run_in_steps(*this, schedule::ceil_div(call_.num_bytes(), chunk_bytes_)); }

  void contribute(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    const uint64_t shard_bytes =
        schedule::shard_length(range.num_elems, num_rails(), kGranuleBytes);
    const at::Tensor chunk = part_of(bytes_, range.begin, range.num_elems);
    DeviceEngine::Splits to = gpus_.engine().no_splits(), from = to;
    at::Tensor outgoing = gpus_.bytes(0), incoming = gpus_.bytes(0);
    if (is_of_root_) {
      if (gpus_.bridge().local_size() > 1) gpus_.broadcast(chunk, root_.local_rank, call_.dtype);
    } else {
      const bool fits = range.num_elems == shard_bytes * num_rails();
      place.shards = fits ? chunk : gpus_.bytes(shard_bytes * num_rails());
    }
    if (gpus_.is_on_rail()) {
      const Range own = schedule::chunk_of(range.num_elems, shard_bytes, own_rail());
      const auto split = static_cast<int64_t>(own.num_elems);
      if (is_of_root_) {
        for (int host = 0; host < gpus_.hosts().num_hosts(); ++host) {
          if (host != root_.host) to[on_rail(host)] = split;
        }
        outgoing = repeated(gpus_, part_of(chunk, own.begin, own.num_elems).data_ptr(),
                            own.num_elems, static_cast<uint64_t>(gpus_.hosts().num_hosts()) - 1);
      } else {
        from[on_rail(root_.host)] = split;
        incoming = part_of(place.shards, own_rail() * shard_bytes, own.num_elems);
      }
    }
    place.exchange =
        gpus_.engine().start(call_.kind_name(), outgoing, std::move(to), incoming, std::move(from));
  }

  void reduce(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    gpus_.engine().finish(call_.kind_name(), place.exchange);
    if (!is_of_root_) gpus_.gather_rails(place.shards, call_.dtype);
  }

  void collect(uint64_t index) {
    Place& place = places_[index % kNumPlaces];
    const Range range = range_of(index);
    void* to = part_of(bytes_, range.begin, range.num_elems).data_ptr();
    if (!is_of_root_ && place.shards.data_ptr() != to) {
      gpus_.copy(to, place.shards.data_ptr(), range.num_elems);
    }
    place = {};
  }

 private:
  struct Place {
    at::Tensor shards;  // of all rails
    DeviceEngine::Exchange exchange;
  };

  uint64_t num_rails() const { return static_cast<uint64_t>(gpus_.num_rails()); }
  uint64_t own_rail() const { return static_cast<uint64_t>(gpus_.bridge().local_rank()); }
  size_t on_rail(int host) const {
    return static_cast<size_t>(gpus_.hosts().rank_at(host, gpus_.bridge().local_rank()));
  }
  Range range_of(uint64_t index) const {
    return schedule::chunk_of(call_.num_bytes(), chunk_bytes_, index);
  }

  HostGpus& gpus_;
  const Call& call_;
  const at::Tensor bytes_;
  const schedule::Hosts::Place root_;
  bool is_of_root_;
  uint64_t chunk_bytes_;
  std::array<Place, kNumPlaces> places_;
};

}  // namespace

void all_gather_over_hosts(HostGpus& gpus, const Call& call, const cpu::Buffers& buffers) {
  AllGather(gpus, call, buffers).run();
}

void broadcast_over_hosts(HostGpus& gpus, const Call& call, const at::Tensor& bytes) {
  Broadcast(gpus, call, bytes).run();
}

}  // namespace rota::tensors
