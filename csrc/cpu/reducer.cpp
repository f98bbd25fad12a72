#include "cpu/reducer.h"

#include "base/limits.h"
#include "cpu/copy.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Elements per block: two float64 temporaries take half of a 32 KiB first-level cache.
constexpr size_t kBlockElems = 1024;
struct alignas(64) Block {
  std::byte bytes[kBlockElems * sizeof(double)];
};

// The same where a block of every contribution of a node is widened: those of 8 ranks take 8 KiB.
constexpr size_t kWidenedElems = 256;

// Splits a range into blocks whose temporaries stay in the first-level cache. Calls body(block,
// offset): the block in elements of the tensor, and its offset in the range.
template <typename Body>
void for_each_block(const Range& range, Body&& body, uint64_t block_elems = kBlockElems) {
  for (uint64_t begin = 0; begin < range.num_elems; begin += block_elems) {
    body(Range{range.begin + begin, schedule::min_of(block_elems, range.num_elems - begin)}, begin);
  }
}

void convert_or_copy(const ElementLoops& loops, DType from, DType to, const void* src, void* dst,
                     size_t num_elems) {
  if (from == to) {
    copy_bytes(dst, src, num_elems * info(to).num_bytes);
  } else {
    loops.convert(from, to)(src, dst, num_elems);
  }
}

}  // namespace

Reducer::Reducer(const Call& call, void* data, bool writes_sums, int world_size)
    : data_(static_cast<std::byte*>(data)),
      writes_sums_(writes_sums),
      dtype_(call.dtype),
      wire_(call.wire),
      hop_(call.hop),
      op_(call.op),
      world_size_(world_size),
      divisor_(static_cast<int>(call.pass.divisor)),
      order_(call.order),
      loops_(element_loops()),
      reduce_wire_(loops_.reduce(call.wire.dtype, call.op)) {}

void Reducer::pack(const Range& range, const WirePlace& wire) const {
  convert_or_copy(loops_, dtype_, wire_.dtype, data(range.begin), wire.payload, range.num_elems);
}

void Reducer::unpack(const WirePlace& wire, const Range& range) const {
  convert_or_copy(loops_, wire_.dtype, dtype_, wire.payload, data(range.begin), range.num_elems);
}

void Reducer::reduce(const WirePlace* srcs, const Range& range,
                     std::span<const WirePlace> wire_outs) const {
  const void* block_srcs[kMaxWorldSize];
  const schedule::Additions additions(order_, world_size_);
  const Summands<const void*> summands{block_srcs, world_size_, additions.of_ranks()};
  if (is_plain() && wire_outs.empty()) {
    for (int i = 0; i < world_size_; ++i) {
      block_srcs[i] = is_from_tensor(srcs[i]) ? data(range.begin) : srcs[i].payload;
    }
    return reduce_wire_(summands, data(range.begin), range.num_elems, divisor_);
  }
  Block own, sums;
  for_each_block(range, [&](const Range& block, uint64_t begin) {
    for (int i = 0; i < world_size_; ++i) {
      if (!is_from_tensor(srcs[i])) {
        block_srcs[i] = wire_.from(srcs[i], begin).payload;
      } else if (is_plain()) {
        block_srcs[i] = data(block.begin);
      } else {
        pack(block, {own.bytes, nullptr});
        block_srcs[i] = own.bytes;
      }
    }
    // The sum overwrites the first output, a source that this core has just fetched, rather than a
    // separate place: each cache line moves between cores once instead of twice.
    const WirePlace sum =
        wire_outs.empty() ? WirePlace{sums.bytes, nullptr} : wire_.from(wire_outs[0], begin);
    reduce_wire_(summands, sum.payload, block.num_elems, divisor_);
    for (size_t i = 1; i < wire_outs.size(); ++i) {
      copy_bytes(wire_.from(wire_outs[i], begin).payload, sum.payload,
                 wire_.payload_bytes(block.num_elems));
    }
    if (writes_sums_) unpack(sum, block);
  });
}

// Every algorithm rounds contributions to the wire dtype, even if it then sends them in a wider
// one.
void Reducer::widen_contribution(const Range& range, std::byte* hop) const {
  if (is_plain() || wire_.dtype == hop_) {
    return convert_or_copy(loops_, dtype_, hop_, data(range.begin), hop, range.num_elems);
  }
  Block wire;
  pack(range, {wire.bytes, nullptr});
  convert_or_copy(loops_, wire_.dtype, hop_, wire.bytes, hop, range.num_elems);
}

void Reducer::start_partial(const Range& range, std::byte* hop) const {
  for_each_block(range, [&](const Range& block, uint64_t begin) {
    widen_contribution(block, hop + begin * hop_bytes());
  });
}

ReduceFn Reducer::add_to_hop() const {
  return loops_.reduce(hop_, op_ == ReduceOp::kAvg ? ReduceOp::kSum : op_);
}

void Reducer::add_to_partial(const std::byte* partial, const Range& range, std::byte* hop) const {
  const ReduceFn add = add_to_hop();
  Block own;
  for_each_block(range, [&](const Range& block, uint64_t begin) {
    widen_contribution(block, own.bytes);
    const void* srcs[] = {partial + begin * hop_bytes(), own.bytes};
    add({srcs, 2}, hop + begin * hop_bytes(), block.num_elems, divisor_);
  });
}

void Reducer::finish_partial(const std::byte* partial, const Range& range,
                             const WirePlace& wire) const {
  const ReduceFn finish = loops_.reduce(hop_, op_);
  Block own, sum;
  for_each_block(range, [&](const Range& block, uint64_t begin) {
    const WirePlace wire_block = wire_.from(wire, begin);
    widen_contribution(block, own.bytes);
    const void* srcs[] = {partial + begin * hop_bytes(), own.bytes};
    finish({srcs, 2}, sum.bytes, block.num_elems, divisor_);
    convert_or_copy(loops_, hop_, wire_.dtype, sum.bytes, wire_block.payload, block.num_elems);
    unpack(wire_block, block);
  });
}

// What has the hop dtype is read where it lies.
void Reducer::sum_to_partial(std::span<const WirePlace> srcs, const Range& range,
                             std::byte* hop) const {
  const auto num_srcs = static_cast<int>(srcs.size());
  const schedule::Additions additions(order_, num_srcs);
  const ReduceFn add = add_to_hop();
  const bool is_wide = wire_.dtype == hop_;
  const uint64_t block_elems = is_wide && is_plain() ? range.num_elems : kWidenedElems;
  alignas(64) std::byte widened[kMaxWorldSize / 2][kWidenedElems * sizeof(float)];
  const void* block_srcs[kMaxWorldSize / 2];
  for_each_block(
      range,
      [&](const Range& block, uint64_t begin) {
        for (size_t i = 0; i < srcs.size(); ++i) {
          block_srcs[i] = widened[i];
          if (is_from_tensor(srcs[i]) && is_plain() && is_wide) {
            block_srcs[i] = data(block.begin);
          } else if (is_from_tensor(srcs[i])) {
            widen_contribution(block, widened[i]);
          } else if (is_wide) {
            block_srcs[i] = wire_.from(srcs[i], begin).payload;
          } else {
            convert_or_copy(loops_, wire_.dtype, hop_, wire_.from(srcs[i], begin).payload,
                            widened[i], block.num_elems);
          }
        }
        add({block_srcs, num_srcs, additions.of_ranks()}, hop + begin * hop_bytes(),
            block.num_elems, divisor_);
      },
      block_elems);
}

void Reducer::sum_partials(std::span<const std::byte* const> partials, const Range& range,
                           const WirePlace& wire) const {
  const auto num_partials = static_cast<int>(partials.size());
  const schedule::Additions additions(order_, num_partials);
  const ReduceFn finish = loops_.reduce(hop_, op_);
  const void* block_srcs[kMaxWorldSize / 2];
  Block sum;
  for_each_block(range, [&](const Range& block, uint64_t begin) {
    for (size_t i = 0; i < partials.size(); ++i) block_srcs[i] = partials[i] + begin * hop_bytes();
    const WirePlace wire_block = wire_.from(wire, begin);
    std::byte* to = wire_.dtype == hop_ ? wire_block.payload : sum.bytes;
    finish({block_srcs, num_partials, additions.of_ranks()}, to, block.num_elems, divisor_);
    if (to != wire_block.payload) {
      convert_or_copy(loops_, hop_, wire_.dtype, to, wire_block.payload, block.num_elems);
    }
    if (writes_sums_) unpack(wire_block, block);
  });
}

}  // namespace rota::cpu
