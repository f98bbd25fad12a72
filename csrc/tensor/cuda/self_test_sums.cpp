#include "tensor/cuda/self_test_sums.h"

#include "cpu/element_loops.h"

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
  void add(const Order& order, const Range& range, std::byte* result,
           const uint8_t* num_additions = nullptr) {
    if (format_.is_block_scaled) {
      WirePlace srcs[kSelfTestRanks];
      for (int i = 0; i < kSelfTestRanks; ++i) srcs[i] = place(of(order[i]), range);
      std::vector<float> sums(range.num_elems);
      cpu::element_loops().wire(format_).decode_sum({srcs, kSelfTestRanks, num_additions},
                                                    sums.data(), sums.size(), 1);
      return encode(sums, range, result);
    }
    const void* srcs[kSelfTestRanks];
    for (int i = 0; i < kSelfTestRanks; ++i) srcs[i] = elems(of(order[i]), range);
    cpu::element_loops().reduce(format_.dtype, op_)({srcs, kSelfTestRanks, num_additions},
                                                    elems(result, range), range.num_elems,
                                                    kSelfTestDivisor);
  }

  void add_in(const schedule::SumOrder& order, std::byte* result) {
    const schedule::Additions additions(order, kSelfTestRanks);
    add({0, 1, 2, 3}, {0, num_elems_}, result, additions.of_ranks());
  }

 private:
  std::byte* of(int rank) { return contributions_[static_cast<size_t>(rank)].data(); }
  std::byte* elems(std::byte* data, const Range& range) const {
    return data + format_.payload_bytes(range.begin);
  }
  WirePlace place(std::byte* data, const Range& range) const {
    return format_.from(format_.place(data, num_elems_), range.begin);
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

std::vector<std::byte> all_reduced(cuda::Kernel kernel, cuda::Sums sums_of_kernel,
                                   const WireFormat& format, ReduceOp op, uint64_t num_elems,
                                   Contributions& contributions) {
  Bytes result(format.num_bytes(num_elems));
  Sums sums(format, op, num_elems, contributions);
  if (kernel == cuda::Kernel::kHierarchical) {
    sums.add_in({.group_size = kSelfTestGroupSize}, result.data());
  } else if (sums_of_kernel == cuda::Sums::kInTree) {
    sums.add_in({.num_shards = kSelfTestRanks}, result.data());
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
