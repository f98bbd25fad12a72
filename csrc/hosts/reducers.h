// What collectives over several hosts share: the calls of their parts within one host, and the
// element work of sums. Within a host these are exact partial sums; between hosts cpu::Reducer, or
// cpu::BucketReducer for gradient buckets and for scaled blocks, works with hosts as contributors.
#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include "base/random_bits.h"
#include "cpu/bucket_reducer.h"
#include "cpu/element_loops.h"
#include "cpu/reducer.h"
#include "hosts/bridge.h"
#include "hosts/scratch.h"
#include "schedule/sum_order.h"

namespace rota::hosts {

// A call whose parts have these lengths, by rank.
inline Call with_parts(Call call, std::span<const cpu::Part> parts) {
  bool are_equal = true;
  uint64_t total = 0;
  uint64_t hash = 0;
  for (const cpu::Part& part : parts) {
    are_equal &= part.num_elems == parts[0].num_elems;
    total += part.num_elems;
    hash = mix(hash ^ (part.num_elems + 1));
  }
  call.num_elems = are_equal ? parts[0].num_elems : total;
  call.uneven = are_equal ? 0 : hash | 1;
  return call;
}

// Where a tensor would begin whose byte `offset` lies at `place`: for code that counts elements
// from a tensor's start, but is given a chunk of it.
inline void* element_zero(std::byte* place, uint64_t offset) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place) - offset);
}

// The sum of a host's contributions, before it is divided.
constexpr ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

// A reduce-scatter among a host's ranks.
inline Call local_reduce_scatter(DType dtype, ReduceOp op, const schedule::SumOrder& order,
                                 std::span<const cpu::Part> parts) {
  Call call{.kind = CollectiveKind::kReduceScatter,
            .op = partial_op(op),
            .dtype = dtype,
            .wire = {dtype},
            .hop = info(dtype).accumulate,
            .order = order};
  return with_parts(call, parts);
}

inline Call local_all_gather(std::span<const cpu::Part> parts) {
  return with_parts({.kind = CollectiveKind::kAllGather}, parts);
}

// The order of a sum within each host and over the hosts.
struct LevelOrders {
  schedule::SumOrder local;
  schedule::SumOrder hosts;
};

// A call over several hosts, and what this rank runs it with.
struct Task {
  Bridge& bridge;
  Scratch& scratch;
  Call call;
  LevelOrders orders{};
  cpu::Buffers buffers{};
  std::optional<Nanoseconds> own_timeout{};
};

// R: cpu::Reducer or cpu::BucketReducer.
template <typename R>
class LevelReducers {
 public:
  // The task must outlive this.
  explicit LevelReducers(const Task& task)
      : bridge_(task.bridge),
        call_(task.call),
        orders_(task.orders),
        accumulate_(kIsBucket ? DType::kFloat32 : info(call_.dtype).accumulate) {}

  // The size of an element of a partial sum, which is in the accumulate dtype.
  size_t elem_bytes() const { return info(accumulate_).num_bytes; }

  // A rank's elements as the ranks of its host sum them: `src` itself, or a copy in the memory that
  // take(num_bytes) returns.
  template <typename Take>
  std::byte* contribution(std::byte* src, uint64_t num_elems, const Take& take) const {
    const float factor = kIsBucket ? call_.pass.contribution_factor : 1;
    if (call_.dtype == accumulate_ && factor == 1) return src;
    std::byte* to = take(num_elems * elem_bytes());
    if (call_.dtype == accumulate_) {
      std::memcpy(to, src, num_elems * elem_bytes());
    } else {
      cpu::element_loops().convert(call_.dtype, accumulate_)(src, to, num_elems);
    }
    if (factor != 1) {
      auto* floats = reinterpret_cast<float*>(to);
      for (uint64_t i = 0; i < num_elems; ++i) floats[i] *= factor;
    }
    return to;
  }

  // Sums the contributions of the host's ranks; sum: this rank's part of it.
  void sum_locally(std::span<const cpu::Part> contributions, const cpu::Part& sum) const {
    bridge_.run_local(local_reduce_scatter(accumulate_, call_.op, orders_.local, contributions),
                      {.inputs = contributions.data(), .outputs = &sum});
  }

  // Sums the hosts' partial sums. partial: this host's, of the tensor's elements in `range`.
  R over_hosts(std::byte* partial, const schedule::Range& range, float* residual = nullptr) const {
    Call call = call_;
    call.dtype = accumulate_;
    call.hop = info(call_.wire.dtype).accumulate;
    call.order = orders_.hosts;
    call.pass.contribution_factor = 1;  // already in the partial sum
    return make(call,
                {.data = element_zero(partial, range.begin * elem_bytes()), .residual = residual});
  }

  // Between the wire and the tensor.
  R to_tensor(const cpu::Buffers& buffers) const { return make(call_, buffers); }

  // Where the sum over hosts reads this host's own contribution: `packed`, which is filled, or the
  // partial sum itself.
  static WirePlace own_contribution(const R& over_hosts, const schedule::Range& range,
                                    const WirePlace& packed) {
    const WirePlace source = over_hosts.own_source(packed);
    if (!cpu::is_from_tensor(source)) over_hosts.pack(range, packed);
    return source;
  }

 private:
  static constexpr bool kIsBucket = std::is_same_v<R, cpu::BucketReducer>;

  R make(const Call& call, const cpu::Buffers& buffers) const {
    const int num_hosts = bridge_.hosts().num_hosts();
    if constexpr (kIsBucket) {
      return R(call, buffers, bridge_.host(), num_hosts);
    } else {
      return R(call, buffers.data, /*writes_sums=*/false, num_hosts);
    }
  }

  Bridge& bridge_;
  const Call& call_;
  const LevelOrders& orders_;
  DType accumulate_;
};

// A sum in scaled blocks of a tensor that is no gradient bucket.
inline Task as_bucket(Task task) {
  Call& call = task.call;
  call.kind = CollectiveKind::kReduceBucket;
  call.pass = {.divisor = call.op == ReduceOp::kAvg ? call.pass.divisor : 1};
  return task;
}

}  // namespace rota::hosts
