// All-reduce over several hosts. Within a host, the ranks reduce-scatter a chunk in the accumulate
// dtype; each rank then sums its shard with the ranks of its rail, one on each other host; at last
// the host's ranks all-gather the results. Between hosts each host is one contributor: its sum is
// rounded once to the wire format, the sum over the hosts is kept in the accumulate dtype, and
// rounded once more.
//
// With N bytes in the wire format and H hosts, a host sends 2 (H - 1) / H N bytes and receives as
// many (Patarasuk & Yuan 2009). Each host's first rank sums short tensors alone: it sends N
// bytes to each other host, with the greeting of the call, and shares the result. Chunks are
// pipelined: while one is awaited, the messages of the next are on their way.
#include <array>
#include <span>
#include <type_traits>
#include <vector>

#include "cpu/float_environment.h"
#include "hosts/executor.h"
#include "schedule/levels.h"

namespace rota::hosts {
namespace {

using schedule::kNumPlaces;
using schedule::Range;

// The length for all ranks of a host, in the accumulate dtype.
constexpr uint64_t kSumChunkBytes = 2 << 20;

// R: cpu::Reducer or cpu::BucketReducer.
template <typename R>
class HierarchicalSum {
 public:
  explicit HierarchicalSum(const Task& task)
      : bridge_(task.bridge),
        scratch_(task.scratch),
        call_(task.call),
        reducers_(task),
        data_(static_cast<std::byte*>(task.buffers.data)),
        residual_(task.buffers.residual),
        chunk_elems_(kSumChunkBytes / elem_bytes()),
        num_chunks_(schedule::ceil_div(call_.num_elems, chunk_elems_)),
        is_short_(num_chunks_ <= 1 &&
                  encoded_bytes(range_of(0)) <=
                      Bridge::kMaxShortBytes / static_cast<size_t>(num_hosts() - 1)),
        is_direct_(std::is_same_v<R, cpu::Reducer> && !is_short_ && !call_.wire.is_block_scaled &&
                   call_.wire.dtype == call_.dtype),
        levels_{is_short_ ? 1 : bridge_.hosts().num_rails(), is_short_ ? 1 : num_hosts(),
                R::kGranuleElems},
        to_tensor_(reducers_.to_tensor(task.buffers)) {}

  bool is_short() const { return is_short_; }
  size_t short_bytes() const { return encoded_bytes(range_of(0)); }

  // In a short sum: this host's sum, as other hosts are to get it.
  std::span<const std::byte> contribution() {
    if (num_chunks_ == 0) return {};
    const cpu::IeeeFloatScope ieee;
    Place& place = place_of(0);
    const Range shard = begin(0, place);
    if (!is_on_rail()) return {};
    const R reducer = sum_over_hosts(place, shard);
    std::byte* packed = buffer(0, 3, encoded_bytes(shard));
    if (shard.num_elems > 0) reducer.pack(shard, call_.wire.place(packed, shard.num_elems));
    own_contribution_ = reducer.own_source(call_.wire.place(packed, shard.num_elems));
    return {packed, encoded_bytes(shard)};
  }

  // Leaders form the short sum of all hosts.
  void sum_contributions() {
    if (num_chunks_ == 0) return;
    const cpu::IeeeFloatScope ieee;
    Place& place = place_of(0);
    for (int host = 0; host < num_hosts(); ++host) {
      place.contributions.push_back(
          host == bridge_.host()
              ? own_contribution_
              : call_.wire.place(bridge_.contribution_of(host), own_shard(0).num_elems));
    }
    reduce(0);
  }

  void run() {
    const cpu::IeeeFloatScope ieee;
    if (is_short_) return num_chunks_ == 0 ? void() : collect(0);
    schedule::run_in_steps(*this, num_chunks_);
  }

  // Sums a chunk within the host, and sends to each other host what it is to sum.
  void contribute(uint64_t chunk) {
    Place& place = place_of(chunk);
    if (is_on_rail()) expect(chunk, place);
    const Range shard = begin(chunk, place);
    if (is_on_rail()) send_contributions(chunk, place, shard);
  }

  // Sums the own part of the own shard over the hosts, and sends them the result.
  void reduce(uint64_t chunk) {
    if (!is_on_rail()) return;
    Place& place = place_of(chunk);
    bridge_.wait(place.contributing, "contributions");
    const R reducer = sum_over_hosts(place, own_shard(chunk));
    const int own = is_short_ ? 0 : bridge_.host();
    for_each_result(chunk, bridge_.local_rank(), place.results,
                    [&](int owner, const WirePlace& result, const Range& part) {
                      if (owner != own || part.num_elems == 0) return;
                      reducer.reduce(place.contributions.data(), part, {&result, 1});
                      for (int host = 0; host < num_hosts() && !is_short_; ++host) {
                        if (host == bridge_.host()) continue;
                        place.sends.push_back(bridge_.send(result.payload, message_bytes(part),
                                                           on_rail(host), kResultTag));
                      }
                    });
  }

  // Gathers the results of all rails and writes them to the tensor.
  void collect(uint64_t chunk) {
    Place& place = place_of(chunk);
    bridge_.wait(place.resulting, "results");
    gather(chunk, place);
    for (int rail = 0; rail < num_rails() && !is_direct_; ++rail) {
      for_each_result(chunk, rail, place.results,
                      [&](int, const WirePlace& result, const Range& part) {
                        if (part.num_elems > 0) to_tensor_.unpack(result, part);
                      });
    }
    bridge_.wait(place.sends, "the network");
  }

 private:
  using Transfers = std::vector<Engine::Transfer>;

  // A chunk on its way.
  struct Place {
    std::byte* partial = nullptr;          // this host's sum of the own shard
    std::vector<WirePlace> contributions;  // to the own part of the shard, by host
    std::byte* results = nullptr;          // of all rails, as they are encoded
    Transfers contributing, resulting;     // messages of other hosts
    Transfers sends;
  };

  int num_hosts() const { return bridge_.hosts().num_hosts(); }
  int num_rails() const { return levels_.num_rails; }
  bool is_on_rail() const { return bridge_.local_rank() < num_rails(); }
  int on_rail(int host) const { return bridge_.hosts().rank_at(host, bridge_.local_rank()); }
  size_t elem_bytes() const { return reducers_.elem_bytes(); }
  Place& place_of(uint64_t chunk) { return places_[chunk % kNumPlaces]; }

  Range range_of(uint64_t chunk) const {
    return schedule::chunk_of(call_.num_elems, chunk_elems_, chunk);
  }
  // The shard of a chunk that a rail sums, and the part of the own one that a host's rank does.
  Range shard_of(uint64_t chunk, int rail) const { return levels_.shard_of(range_of(chunk), rail); }
  Range own_shard(uint64_t chunk) const { return shard_of(chunk, bridge_.local_rank()); }
  Range part_of(uint64_t chunk, int host) const { return levels_.part_of(own_shard(chunk), host); }
  size_t message_bytes(const Range& range) const { return call_.wire.num_bytes(range.num_elems); }
  // In a buffer.
  size_t encoded_bytes(const Range& range) const { return Scratch::round_up(message_bytes(range)); }
  size_t result_bytes(const Range& range) const {
    return is_direct_ ? message_bytes(range) : encoded_bytes(range);
  }
  // The encoded results of one rail.
  size_t rail_bytes(uint64_t chunk, int rail) const {
    size_t num_bytes = 0;
    levels_.for_each_part(shard_of(chunk, rail),
                          [&](int, const Range& part) { num_bytes += result_bytes(part); });
    return num_bytes;
  }
  // Calls body(host, place, part) for each part of a rail's encoded results; a short sum has one.
  template <typename Body>
  void for_each_result(uint64_t chunk, int rail, std::byte* results, const Body& body) const {
    for (int before = 0; before < rail; ++before) results += rail_bytes(chunk, before);
    levels_.for_each_part(shard_of(chunk, rail), [&](int host, const Range& part) {
      body(host, call_.wire.place(results, part.num_elems), part);
      results += result_bytes(part);
    });
  }

  // Each place has buffers of its own.
  std::byte* buffer(uint64_t chunk, size_t number, size_t num_bytes) {
    constexpr size_t kNumBuffers = 5;
    return scratch_.at_least((chunk % kNumPlaces) * kNumBuffers + number, num_bytes);
  }

  std::byte* results_buffer(uint64_t chunk) {
    if (is_short_) return bridge_.short_result();
    if (is_direct_) return data_ + range_of(chunk).begin * info(call_.dtype).num_bytes;
    size_t num_bytes = 0;
    for (int rail = 0; rail < num_rails(); ++rail) num_bytes += rail_bytes(chunk, rail);
    return buffer(chunk, 2, num_bytes);
  }

  // The sum over the hosts of a chunk's own shard.
  R sum_over_hosts(const Place& place, const Range& shard) const {
    return reducers_.over_hosts(place.partial, shard, residual_);
  }

  // Sums a chunk within the host, and returns the own shard of it.
  Range begin(uint64_t chunk, Place& place) {
    const Range shard = is_on_rail() ? own_shard(chunk) : Range{0, 0};
    place.partial = buffer(chunk, 1, shard.num_elems * elem_bytes());
    place.results = results_buffer(chunk);
    reduce_scatter(chunk, place, shard);
    return shard;
  }

  // A recv is there before its message, so that a message need not wait.
  void expect(uint64_t chunk, Place& place) {
    place.results = results_buffer(chunk);
    const Range own = part_of(chunk, bridge_.host());
    const size_t own_bytes = encoded_bytes(own);
    std::byte* incoming = buffer(chunk, 3, own_bytes * static_cast<size_t>(num_hosts()));
    place.contributions.clear();
    for (int host = 0; host < num_hosts(); ++host) {
      place.contributions.push_back(call_.wire.place(incoming, own.num_elems));
      if (host != bridge_.host()) {
        place.contributing.push_back(
            bridge_.recv(incoming, message_bytes(own), on_rail(host), kContributionTag));
      }
      incoming += own_bytes;
    }
    for_each_result(chunk, bridge_.local_rank(), place.results,
                    [&](int host, const WirePlace& result, const Range& part) {
                      if (host == bridge_.host()) return;
                      place.resulting.push_back(bridge_.recv(result.payload, message_bytes(part),
                                                             on_rail(host), kResultTag));
                    });
  }

  void reduce_scatter(uint64_t chunk, const Place& place, const Range& shard) {
    const Range whole = range_of(chunk);
    std::byte* source =
        reducers_.contribution(data_ + whole.begin * info(call_.dtype).num_bytes, whole.num_elems,
                               [&](size_t num_bytes) { return buffer(chunk, 0, num_bytes); });
    std::vector<cpu::Part> parts(static_cast<size_t>(bridge_.local_size()), cpu::Part{source, 0});
    for (int rail = 0; rail < num_rails(); ++rail) {
      const Range range = shard_of(chunk, rail);
      parts[static_cast<size_t>(rail)] = {source + (range.begin - whole.begin) * elem_bytes(),
                                          range.num_elems};
    }
    reducers_.sum_locally(parts, {place.partial, shard.num_elems});
  }

  void send_contributions(uint64_t chunk, Place& place, const Range& shard) {
    const R reducer = sum_over_hosts(place, shard);
    const Range own = part_of(chunk, bridge_.host());
    WirePlace& contribution = place.contributions[static_cast<size_t>(bridge_.host())];
    contribution = reducers_.own_contribution(reducer, own, contribution);
    const bool is_plain = cpu::is_from_tensor(contribution);  // goes out as it is
    std::byte* outgoing =
        is_plain ? nullptr
                 : buffer(chunk, 4,
                          encoded_bytes(shard) + static_cast<size_t>(num_hosts()) * kPlaceBytes);
    for (int host = 0; host < num_hosts(); ++host) {
      if (host == bridge_.host()) continue;
      const Range part = part_of(chunk, host);
      std::byte* message = place.partial + (part.begin - shard.begin) * elem_bytes();
      if (!is_plain) {
        message = outgoing;
        reducer.pack(part, call_.wire.place(message, part.num_elems));
        outgoing += encoded_bytes(part);
      }
      place.sends.push_back(
          bridge_.send(message, message_bytes(part), on_rail(host), kContributionTag));
    }
  }

  void gather(uint64_t chunk, const Place& place) {
    if (bridge_.local_size() == 1 || is_short_) return;
    std::vector<cpu::Part> parts(static_cast<size_t>(bridge_.local_size()),
                                 cpu::Part{place.results, 0});
    std::byte* begin = place.results;
    for (int rail = 0; rail < num_rails(); ++rail) {
      parts[static_cast<size_t>(rail)] = {begin, rail_bytes(chunk, rail)};
      begin += rail_bytes(chunk, rail);
    }
    bridge_.run_local(
        local_all_gather(parts),
        {.inputs = &parts[static_cast<size_t>(bridge_.local_rank())], .outputs = parts.data()});
  }

  Bridge& bridge_;
  Scratch& scratch_;
  const Call& call_;
  const LevelReducers<R> reducers_;
  std::byte* data_;
  float* residual_;
  uint64_t chunk_elems_;
  uint64_t num_chunks_;
  bool is_short_;   // every leader sums all of it
  bool is_direct_;  // results are the tensor's bits, and arrive there
  const schedule::Levels levels_;
  const R to_tensor_;
  std::array<Place, kNumPlaces> places_;
  WirePlace own_contribution_{};  // of a short sum
};

template <typename R>
void run(const Task& task) {
  HierarchicalSum<R> sum(task);
  const Bridge::ShortSum short_sum{.contribute = [&] { return sum.contribution(); },
                                   .sum = [&] { sum.sum_contributions(); },
                                   .result_bytes = sum.short_bytes()};
  task.bridge.run(
      task.call, task.own_timeout, [&] { sum.run(); }, sum.is_short() ? &short_sum : nullptr);
}

}  // namespace

void hierarchical_sum(const Task& task) {
  if (task.call.kind == CollectiveKind::kReduceBucket) {
    run<cpu::BucketReducer>(task);
  } else if (task.call.wire.is_block_scaled) {
    run<cpu::BucketReducer>(as_bucket(task));
  } else {
    run<cpu::Reducer>(task);
  }
}

}  // namespace rota::hosts
