#include "tensor/cuda/self_test_sums.h"

#include <algorithm>

#include "base/tile.h"
#include "cpu/element_loops.h"
#include "schedule/chunk.h"

namespace rota::tensors {
namespace {

using Bytes = std::vector<std::byte>;
using Order = std::array<int, kSelfTestRanks>;
using schedule::Range;

// The CPU's sums of whole tensors.
class Sums {
 public:
  Sums(const WireFormat& format, ReduceOp op, uint64_t num_elems, Contributions& contributions)
      : format_(format), op_(op), num_elems_(num_elems), contributions_(contributions) {}

  // Sums the elements of the range from left to right in `order`; does not change the rest of the
  // result.
  void add(const Order& order, const Range& range, std::byte* result) {
    if (format_.is_block_scaled) {
      std::vector<float> sums = decode_sum(order, range);
      return encode(sums, range, result);
    }
    const void* srcs[kSelfTestRanks];
    for (int i = 0; i < kSelfTestRanks; ++i) srcs[i] = elems(of(order[i]), range);
    cpu::element_loops().reduce(format_.dtype, op_)(srcs, kSelfTestRanks, elems(result, range),
                                                    range.num_elems, kSelfTestDivisor);
  }

  // Sums within groups, then across groups, in the accumulate dtype.
  void add_in_groups(std::byte* result) {
    const Range all{0, num_elems_};
    if (format_.is_block_scaled) {
      std::vector<float> sums = decode_sum(std::array{0, 1}, all);
      const std::vector<float> others = decode_sum(std::array{2, 3}, all);
      for (uint64_t i = 0; i < num_elems_; ++i) sums[i] += others[i];
      return encode(sums, all, result);
    }
    const DType accumulate = info(format_.dtype).accumulate;
    const ReduceOp partial_op = op_ == ReduceOp::kAvg ? ReduceOp::kSum : op_;
    const auto& loops = cpu::element_loops();
    std::array<Bytes, kSelfTestRanks> widened;
    for (int rank = 0; rank < kSelfTestRanks; ++rank) {
      widened[rank] = converted(format_.dtype, accumulate, of(rank));
    }
    std::array<Bytes, 2> partials;
    for (int group = 0; group < 2; ++group) {
      partials[group].resize(num_elems_ * info(accumulate).num_bytes);
      const void* srcs[] = {widened[kSelfTestGroupSize * group].data(),
                            widened[kSelfTestGroupSize * group + 1].data()};
      loops.reduce(accumulate, partial_op)(srcs, 2, partials[group].data(), num_elems_,
                                           kSelfTestDivisor);
    }
    const void* srcs[] = {partials[0].data(), partials[1].data()};
    Bytes sums(partials[0].size());
    loops.reduce(accumulate, op_)(srcs, 2, sums.data(), num_elems_, kSelfTestDivisor);
    const Bytes rounded = converted(accumulate, format_.dtype, sums.data());
    std::copy(rounded.begin(), rounded.end(), result);
  }

 private:
  std::byte* of(int rank) { return contributions_[static_cast<size_t>(rank)].data(); }
  std::byte* elems(std::byte* data, const Range& range) const {
    return data + format_.payload_bytes(range.begin);
  }
  WirePlace place(std::byte* data, const Range& range) const {
    return format_.from(format_.place(data, num_elems_), range.begin);
  }
  Bytes converted(DType from, DType to, const std::byte* src) const {
    Bytes result(num_elems_ * info(to).num_bytes);
    if (from == to) {
      std::copy_n(src, result.size(), result.begin());
    } else {
      cpu::element_loops().convert(from, to)(src, result.data(), num_elems_);
    }
    return result;
  }
  template <size_t num_ranks>
  std::vector<float> decode_sum(const std::array<int, num_ranks>& order, const Range& range) {
    WirePlace srcs[num_ranks];
    for (size_t i = 0; i < num_ranks; ++i) srcs[i] = place(of(order[i]), range);
    std::vector<float> sums(range.num_elems);
    cpu::element_loops().wire(format_).decode_sum(srcs, num_ranks, sums.data(), sums.size(), 1);
    return sums;
  }
  void encode(std::vector<float>& sums, const Range& range, std::byte* result) const {
    for (float& sum : sums) {
      if (op_ == ReduceOp::kAvg) sum /= kSelfTestDivisor;
    }
    cpu::element_loops().wire(format_).encode(sums.data(), place(result, range), sums.size(), 1);
  }

  WireFormat format_;
  ReduceOp op_;
  uint64_t num_elems_;
  Contributions& contributions_;
};

constexpr Order order_from(int first) {
  Order order{};
  for (int i = 0; i < kSelfTestRanks; ++i) order[i] = (first + i) % kSelfTestRanks;
  return order;
}

}  // namespace

std::vector<std::byte> all_reduced(cuda::Kernel kernel, const WireFormat& format, ReduceOp op,
                                   uint64_t num_elems, Contributions& contributions) {
  Bytes result(format.num_bytes(num_elems));
  Sums sums(format, op, num_elems, contributions);
  if (kernel == cuda::Kernel::kHierarchical) {
    sums.add_in_groups(result.data());
  } else if (kernel == cuda::Kernel::kRing) {
    // schedule/ring.h: the sum of shard p starts at rank p.
    const uint64_t granule = format.is_block_scaled ? kTileElems : kGranuleElems;
    for (int shard = 0; shard < kSelfTestRanks; ++shard) {
      const Range range = schedule::even_shard(num_elems, kSelfTestRanks, shard, granule);
      sums.add(order_from(shard), range, result.data());
    }
  } else {
    sums.add(order_from(0), {0, num_elems}, result.data());
  }
  return result;
}

}  // namespace rota::tensors
