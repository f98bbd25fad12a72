#include "cpu/reducer.h"

#include <algorithm>

#include "cpu/copy.h"

namespace rota::cpu {
namespace {

// Elements of a block: two float64 temporaries take half of a 32 KiB first-level cache.
constexpr size_t kBlockElems = 1024;
struct alignas(64) Block {
  std::byte bytes[kBlockElems * sizeof(double)];
};

const std::byte* at(const void* base, size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}
std::byte* at(void* base, size_t offset) { return static_cast<std::byte*>(base) + offset; }

void convert_or_copy(const ElementLoops& loops, DType from, DType to, const void* src, void* dst,
                     size_t num_elems) {
  if (from == to) {
    copy_bytes(dst, src, num_elems * info(to).num_bytes);
  } else {
    loops.convert(from, to)(src, dst, num_elems);
  }
}

}  // namespace

Reducer::Reducer(DType dtype, DType wire, DType hop, ReduceOp op, int world_size)
    : dtype_(dtype),
      wire_(wire),
      hop_(hop),
      world_size_(world_size),
      loops_(element_loops()),
      reduce_wire_(loops_.reduce(wire, op)),
      add_hop_(loops_.reduce(hop, op == ReduceOp::kAvg ? ReduceOp::kSum : op)),
      finish_hop_(loops_.reduce(hop, op)) {}

template <typename Body>
void Reducer::for_each_block(size_t num_elems, Body&& body) const {
  for (size_t begin = 0; begin < num_elems; begin += kBlockElems) {
    body(begin, std::min(kBlockElems, num_elems - begin));
  }
}

void Reducer::pack(const void* data, void* wire, size_t num_elems) const {
  convert_or_copy(loops_, dtype_, wire_, data, wire, num_elems);
}

void Reducer::unpack(const void* wire, void* data, size_t num_elems) const {
  convert_or_copy(loops_, wire_, dtype_, wire, data, num_elems);
}

void Reducer::reduce(const void* const* srcs, void* data, std::span<std::byte* const> wire_outs,
                     size_t num_elems) const {
  if (is_plain() && wire_outs.empty()) {
    return reduce_wire_(srcs, world_size_, data, num_elems, world_size_);
  }
  Block sums;
  for_each_block(num_elems, [&](size_t begin, size_t block_elems) {
    const size_t wire_begin = begin * wire_bytes();
    const void* block_srcs[kMaxWorldSize];
    for (int i = 0; i < world_size_; ++i) block_srcs[i] = at(srcs[i], wire_begin);
    // Into the first source that a core has just fetched, not into a place of its own: the line
    // changes hands once instead of twice.
    std::byte* sum = wire_outs.empty() ? sums.bytes : wire_outs[0] + wire_begin;
    reduce_wire_(block_srcs, world_size_, sum, block_elems, world_size_);
    for (size_t i = 1; i < wire_outs.size(); ++i) {
      copy_bytes(wire_outs[i] + wire_begin, sum, block_elems * wire_bytes());
    }
    unpack(sum, at(data, begin * elem_bytes()), block_elems);
  });
}

// A contribution is rounded to the wire dtype in every algorithm, also where it then travels wider.
void Reducer::widen_contribution(const void* data, void* hop, size_t num_elems) const {
  if (is_plain() || wire_ == hop_) {
    return convert_or_copy(loops_, dtype_, hop_, data, hop, num_elems);
  }
  Block wire;
  pack(data, wire.bytes, num_elems);
  convert_or_copy(loops_, wire_, hop_, wire.bytes, hop, num_elems);
}

void Reducer::start_partial(const void* data, void* hop, size_t num_elems) const {
  for_each_block(num_elems, [&](size_t begin, size_t block_elems) {
    widen_contribution(at(data, begin * elem_bytes()), at(hop, begin * hop_bytes()), block_elems);
  });
}

void Reducer::add_to_partial(const void* partial, const void* data, void* hop,
                             size_t num_elems) const {
  Block own;
  for_each_block(num_elems, [&](size_t begin, size_t block_elems) {
    widen_contribution(at(data, begin * elem_bytes()), own.bytes, block_elems);
    const void* srcs[] = {at(partial, begin * hop_bytes()), own.bytes};
    add_hop_(srcs, 2, at(hop, begin * hop_bytes()), block_elems, world_size_);
  });
}

void Reducer::finish_partial(const void* partial, void* data, void* wire, size_t num_elems) const {
  Block own, sum;
  for_each_block(num_elems, [&](size_t begin, size_t block_elems) {
    void* data_block = at(data, begin * elem_bytes());
    void* wire_block = at(wire, begin * wire_bytes());
    widen_contribution(data_block, own.bytes, block_elems);
    const void* srcs[] = {at(partial, begin * hop_bytes()), own.bytes};
    finish_hop_(srcs, 2, sum.bytes, block_elems, world_size_);
    convert_or_copy(loops_, hop_, wire_, sum.bytes, wire_block, block_elems);
    unpack(wire_block, data_block, block_elems);
  });
}

}  // namespace rota::cpu
