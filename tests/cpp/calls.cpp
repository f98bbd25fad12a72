#include "calls.h"

#include <algorithm>
#include <bitset>
#include <cstring>
#include <memory>
#include <utility>

#include "base/per_process.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "numbers.h"
#include "ranks.h"
#include "reference.h"
#include "transport/heap.h"

namespace rota::test {
namespace {

// A tensor's memory. Outside the heap it has exactly the tensor's size, so that AddressSanitizer
// catches any access beyond its end.
class Tensor {
 public:
  Tensor(const TestCall& call, DType dtype, uint64_t num_elems, int rank)
      : dtype_(dtype), num_elems_(num_elems), misalignment_(call.misalignment) {
    const size_t num_bytes = call.misalignment + num_elems * info(dtype).num_bytes;
    if ((call.in_heap >> rank & 1) != 0) {
      auto& heap = per_process<transport::Heap>();
      bytes_.reset(static_cast<std::byte*>(heap.allocate(num_bytes)),
                   [&heap](std::byte* bytes) { heap.release(bytes); });
    } else {
      bytes_.reset(new std::byte[num_bytes](), std::default_delete<std::byte[]>());
    }
  }

  // Null for an empty tensor, as in torch.
  void* data() { return num_elems_ == 0 ? nullptr : bytes_.get() + misalignment_; }
  uint64_t num_elems() const { return num_elems_; }
  void set(uint64_t elem, uint64_t bits) { store_bits(dtype_, data(), elem, bits); }
  uint64_t get(uint64_t elem) { return load_bits(dtype_, data(), elem); }

 private:
  DType dtype_;
  uint64_t num_elems_;
  size_t misalignment_;
  std::shared_ptr<std::byte> bytes_;
};

int64_t contribution(const TestCall& call, int world_size, uint64_t seed, int rank, uint64_t elem) {
  return exact_integer(call.wire.value_or(call.dtype), call.op, world_size, hash(seed, rank, elem));
}

void check_elem(const TestCall& call, Tensor& tensor, uint64_t elem, uint64_t expected, int rank) {
  if (tensor.get(elem) == expected) return;
  fail(join("rank ", rank, ", ", call.to_string(), ": element ", elem, " has bits ",
            tensor.get(elem), ", expected ", expected));
}

// A sum of numbers that are exact in any order, in the order of its nodes.
Call with_levels(Call planned, int node_size) {
  if (node_size == 0) return planned;
  planned.algorithm = schedule::Algorithm::kTwoLevel;
  planned.node_size = node_size;
  planned.order = {.group_size = node_size};
  return planned;
}

Call plan(const Caller& caller, const TestCall& call) {
  const Planner planner(caller.world_size);
  if (call.kind != CollectiveKind::kAllReduce) {
    const auto wire =
        call.wire ? std::optional(WireFormat{*call.wire, call.block_scaling}) : std::nullopt;
    return planner.collective(call.kind, call.dtype, call.num_elems, call.op, call.root, wire);
  }
  return planner.all_reduce(
      call.dtype, call.num_elems,
      {.op = call.op, .algorithm = call.algorithm, .wire = call.wire, .hop = call.hop});
}

// And reduce, which leaves the tensors of all ranks but the root as they are.
void all_reduce(const Caller& caller, const TestCall& call, uint64_t seed) {
  const int world_size = caller.world_size;
  Tensor tensor(call, call.dtype, call.num_elems, caller.rank);
  const auto bits_of = [&](int rank, uint64_t elem) {
    return bits_of_integer(call.dtype, contribution(call, world_size, seed, rank, elem));
  };
  for (uint64_t i = 0; i < call.num_elems; ++i) tensor.set(i, bits_of(caller.rank, i));
  const Call planned = with_levels(plan(caller, call), call.node_size);
  caller.run(planned, {.data = tensor.data()});
  std::vector<uint64_t> srcs(static_cast<size_t>(world_size));
  for (uint64_t i = 0; i < call.num_elems; ++i) {
    for (int rank = 0; rank < world_size; ++rank) {
      srcs[static_cast<size_t>(rank)] = bits_of(rank, i);
    }
    // Exact in any order, so one reference result serves every algorithm and wire dtype.
    const bool receives = is_among(row_of(call.kind).receivers, caller.rank, call.root);
    const uint64_t expected =
        receives ? reduce_scalars(call.dtype, call.op, srcs, world_size) : bits_of(caller.rank, i);
    check_elem(call, tensor, i, expected, caller.rank);
  }
}

// An average of numbers that are exact in every wire dtype, with or without block scaling.
void reduce_bucket(const Caller& caller, const TestCall& call, uint64_t seed) {
  const int world_size = caller.world_size;
  Tensor tensor(call, call.dtype, call.num_elems, caller.rank);
  const auto value_of = [&](int rank, uint64_t elem) {
    return contribution(call, world_size, seed, rank, elem);
  };
  for (uint64_t i = 0; i < call.num_elems; ++i) {
    tensor.set(i, bits_of_integer(call.dtype, value_of(caller.rank, i)));
  }
  // Every other seed uses error feedback; the residual must stay 0, because nothing is rounded.
  std::vector<float> residual(seed % 2 == 0 ? call.num_elems : 0);
  const BucketOptions options{.wire = {*call.wire, call.block_scaling},
                              .pass = {.divisor = static_cast<float>(world_size) / 2,
                                       .result_factor = 0.5f,
                                       .has_residual = !residual.empty()},
                              .algorithm = call.algorithm};
  const Call planned = with_levels(
      Planner(world_size).reduce_bucket(call.dtype, call.num_elems, options), call.node_size);
  cpu::BucketMeasures measures(call.num_elems);
  caller.run(planned, {.data = tensor.data(), .residual = residual.data(), .measures = &measures});
  double squares = 0;
  for (uint64_t i = 0; i < call.num_elems; ++i) {
    int64_t sum = 0;
    for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, i);
    squares += static_cast<double>(sum / world_size * (sum / world_size));
    check_elem(call, tensor, i, bits_of_integer(call.dtype, sum / world_size), caller.rank);
  }
  for (const float lost : residual) check_equal(lost, 0.0f, "what rounding lost");
  check_equal(measures.sum_of_squares(), squares, "the sum of squares");
  check_equal(measures.num_non_finite, uint64_t{0}, "the number of non-finite elements");
}

// Collectives that do not reduce are compared byte by byte, for elements of any size. Elements that
// travel in a wire format are numbers that are exact in it.
uint64_t byte_of(const TestCall& call, uint64_t seed, int rank, uint64_t index) {
  if (!call.wire) return hash(seed, rank, index) & 0xff;
  const size_t elem_bytes = info(call.dtype).num_bytes;
  std::byte elem[sizeof(double)];
  store_bits(call.dtype, elem, 0,
             bits_of_integer(call.dtype, contribution(call, 1, seed, rank, index / elem_bytes)));
  return static_cast<uint64_t>(elem[index % elem_bytes]);
}

Tensor make_bytes(const TestCall& call, int rank) {
  return Tensor(call, DType::kUInt8, call.num_elems * info(call.dtype).num_bytes, rank);
}

void fill(Tensor& bytes, const TestCall& call, uint64_t seed, int rank) {
  for (uint64_t i = 0; i < bytes.num_elems(); ++i) bytes.set(i, byte_of(call, seed, rank, i));
}

void broadcast(const Caller& caller, const TestCall& call, uint64_t seed) {
  Tensor tensor = make_bytes(call, caller.rank);
  fill(tensor, call, seed, caller.rank);
  caller.run(plan(caller, call), {.data = tensor.data()});
  for (uint64_t i = 0; i < tensor.num_elems(); ++i) {
    check_elem(call, tensor, i, byte_of(call, seed, call.root, i), caller.rank);
  }
}

// The tensors of a side with a part for each rank.
class Parts {
 public:
  template <typename LengthOf>
  Parts(const TestCall& call, int rank, int world_size, LengthOf length_of) {
    for (int peer = 0; peer < world_size; ++peer) {
      TestCall part = call;
      part.num_elems = length_of(peer);
      tensors_.push_back(make_bytes(part, rank));
      parts_.push_back({tensors_.back().data(), part.num_elems});
    }
  }

  // Moves all parts, which have the same length and are filled, to one tensor, as which peers can
  // read them in place.
  void join(const TestCall& call, int rank) {
    if (call.num_elems == 0) return;
    TestCall whole = call;
    whole.num_elems = call.num_elems * parts_.size();
    Tensor joined = make_bytes(whole, rank);
    auto* place = static_cast<std::byte*>(joined.data());
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::memcpy(place, parts_[i].data, tensors_[i].num_elems());
      parts_[i].data = place;
      place += tensors_[i].num_elems();
    }
    tensors_.clear();
    tensors_.push_back(std::move(joined));
  }

  Tensor& operator[](int rank) { return tensors_[static_cast<size_t>(rank)]; }
  const cpu::Part* parts() const { return parts_.data(); }

 private:
  std::vector<Tensor> tensors_;
  std::vector<cpu::Part> parts_;
};

// The stream of bytes that `from` has for `to`.
int pair_of(int from, int to) { return from * kMaxWorldSize + to; }

// all_gather, gather, scatter and all_to_all: rank `from` has a part for rank `to`, unless it sends
// the same to all. Every third seed gives the parts of all_gather and all_to_all different lengths.
void copy_parts(const Caller& caller, const TestCall& call, uint64_t seed) {
  const CollectiveRow& row = row_of(call.kind);
  const int rank = caller.rank;
  const int world_size = caller.world_size;
  const bool is_uneven = seed % 3 == 0 && !row.has_root();
  // Short parts travel with the post, while those of other ranks need rounds.
  const auto length_of = [&](int from, int to) {
    if (!is_uneven) return call.num_elems;
    if (from == 0) return call.num_elems / 64;
    return call.num_elems * static_cast<uint64_t>((from + (row.is_input_per_rank ? to : 0)) % 4) /
           2;
  };
  const auto stream_of = [&](int from, int to) {
    return row.is_input_per_rank ? pair_of(from, to) : from;
  };
  const int num_inputs = row.is_input_per_rank ? world_size : 1;
  const int num_outputs = row.is_output_per_rank ? world_size : 1;
  const auto sender_of = [&](int output) { return row.is_output_per_rank ? output : call.root; };
  Parts inputs(call, rank, num_inputs, [&](int to) { return length_of(rank, to); });
  Parts outputs(call, rank, num_outputs, [&](int i) { return length_of(sender_of(i), rank); });
  for (int to = 0; to < num_inputs; ++to) fill(inputs[to], call, seed, stream_of(rank, to));
  if (call.kind == CollectiveKind::kScatter && seed % 2 == 0) inputs.join(call, rank);
  // Every other seed runs all_gather in place: the input is the own part of the output.
  const bool is_in_place = call.kind == CollectiveKind::kAllGather && seed % 2 == 0;
  if (is_in_place) fill(outputs[rank], call, seed, rank);

  Call planned = plan(caller, call);
  if (is_uneven && call.kind == CollectiveKind::kAllGather) planned.uneven = seed;
  if (call.kind == CollectiveKind::kAllToAll) planned.num_elems = 0;
  caller.run(planned, {.inputs = is_in_place ? outputs.parts() + rank : inputs.parts(),
                       .outputs = outputs.parts()});
  if (!is_among(row.receivers, rank, call.root)) return;
  for (int i = 0; i < num_outputs; ++i) {
    for (uint64_t byte = 0; byte < outputs[i].num_elems(); ++byte) {
      check_elem(call, outputs[i], byte, byte_of(call, seed, stream_of(sender_of(i), rank), byte),
                 rank);
    }
  }
}

// Sums of a part for each rank, which every other seed makes unequal.
void reduce_scatter(const Caller& caller, const TestCall& call, uint64_t seed) {
  const int rank = caller.rank;
  const int world_size = caller.world_size;
  const bool is_uneven = seed % 2 == 0;
  const auto length_of = [&](int owner) {
    return is_uneven ? call.num_elems * static_cast<uint64_t>(owner % 3) / 2 : call.num_elems;
  };
  const auto bits_of = [&](int from, int to, uint64_t elem) {
    return bits_of_integer(call.dtype,
                           contribution(call, world_size, seed, pair_of(from, to), elem));
  };
  // Parts of one tensor can be read in place.
  const bool is_one_tensor = seed % 3 != 0;
  uint64_t total = 0;
  for (int owner = 0; owner < world_size; ++owner) total += length_of(owner);
  std::vector<Tensor> inputs;
  if (is_one_tensor) inputs.emplace_back(call, call.dtype, total, rank);
  std::vector<cpu::Part> parts;
  uint64_t begin = 0;  // of the part in its tensor
  for (int owner = 0; owner < world_size; ++owner) {
    const uint64_t length = length_of(owner);
    if (!is_one_tensor) inputs.emplace_back(call, call.dtype, length, rank);
    Tensor& input = inputs.back();
    for (uint64_t i = 0; i < length; ++i) input.set(begin + i, bits_of(rank, owner, i));
    auto* data = static_cast<std::byte*>(input.data());
    parts.push_back({data + begin * info(call.dtype).num_bytes, length});
    if (is_one_tensor) begin += length;
  }
  Tensor sum(call, call.dtype, length_of(rank), rank);
  const cpu::Part output{sum.data(), sum.num_elems()};
  Call planned = plan(caller, call);
  if (is_uneven) planned.uneven = seed + 1;
  caller.run(planned, {.inputs = parts.data(), .outputs = &output});
  std::vector<uint64_t> srcs(static_cast<size_t>(world_size));
  for (uint64_t i = 0; i < sum.num_elems(); ++i) {
    for (int from = 0; from < world_size; ++from) {
      srcs[static_cast<size_t>(from)] = bits_of(from, rank, i);
    }
    check_elem(call, sum, i, reduce_scalars(call.dtype, call.op, srcs, world_size), rank);
  }
}

}  // namespace

std::string TestCall::to_string() const {
  std::string text = join(name(kind), '(', name(dtype), '[', num_elems, "], ", name(op));
  if (algorithm) text += join(", ", schedule::name(*algorithm));
  if (wire) text += join(", wire ", name(*wire), block_scaling ? " in scaled blocks" : "");
  if (hop) text += join(", hop ", name(*hop));
  if (node_size != 0) text += join(", nodes of ", node_size);
  return text + join(", root ", root, ", misaligned by ", misalignment, ", in heaps of ranks ",
                     std::bitset<kMaxWorldSize>(in_heap), ')');
}

void call_and_check(const Caller& caller, const TestCall& call, uint64_t seed) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      return all_reduce(caller, call, seed);
    case CollectiveKind::kReduceBucket:
      return reduce_bucket(caller, call, seed);
    case CollectiveKind::kBroadcast:
      return broadcast(caller, call, seed);
    case CollectiveKind::kReduceScatter:
      return reduce_scatter(caller, call, seed);
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
      return copy_parts(caller, call, seed);
    case CollectiveKind::kSendRecv:
    case CollectiveKind::kBarrier:
      return caller.run({.kind = CollectiveKind::kBarrier}, {});
  }
}

void call_and_check(Communicator& communicator, const TestCall& call, uint64_t seed,
                    CallerThread thread) {
  call_and_check({communicator.rank(), communicator.world_size(),
                  [&](const Call& planned, const cpu::Buffers& buffers) {
                    communicator.run(planned, buffers, thread);
                  }},
                 call, seed);
}

TestCall random_call(Random& random, int world_size) {
  TestCall call;
  // Half of all calls are all-reduces, because they have the most variants.
  using enum CollectiveKind;
  call.kind = random.choose(std::array{kAllReduce, kAllReduce, kAllReduce, kReduceBucket,
                                       kReduceBucket, kReduce, kReduceScatter, kBroadcast,
                                       kAllGather, kGather, kScatter, kAllToAll, kBarrier});
  if (row_of(call.kind).reduces && call.kind != kReduceBucket) {
    call.dtype = random.choose(reducible_dtypes());
    call.op = random.choose(defined_ops(call.dtype));
  } else if (call.kind == kReduceBucket) {
    call.op = ReduceOp::kAvg;
    call.dtype = random.choose(std::array{DType::kFloat32, DType::kFloat64, DType::kFloat16});
    call.wire = random.choose(std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                         DType::kFloat8E4M3, DType::kFloat8E5M2});
    call.block_scaling = has_block_scaling(*call.wire) && random.below(3) > 0;
  } else if (call.kind == kAllGather && random.below(2) == 0) {
    call.dtype = random.choose(std::array{DType::kFloat32, DType::kFloat64, DType::kFloat16});
    call.wire = random.choose(
        std::array{DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
    call.block_scaling = has_block_scaling(*call.wire) && random.below(3) > 0;
  } else {
    call.dtype = static_cast<DType>(random.below(kNumDTypes));
  }
  if (random.below(5) > 0) call.algorithm = random.choose(kAlgorithms);
  if (call.kind == kAllReduce && call.dtype == DType::kFloat32 && random.below(2) == 0) {
    call.wire = random.choose(std::array{DType::kFloat16, DType::kBFloat16});
    if (call.algorithm == schedule::Algorithm::kRing && random.below(2) == 0) call.hop = call.wire;
  }
  call.root = static_cast<int>(random.below(static_cast<uint64_t>(world_size)));
  const size_t elem_bytes = info(call.dtype).num_bytes;
  // More rounds than the call has slots.
  const uint64_t num_slots =
      2 + (row_of(call.kind).reduces ? transport::kNumSlots : transport::kNumCopySlots);
  const uint64_t limits[] = {16, kSmall.message_bytes / elem_bytes, kSmall.slot_bytes / elem_bytes,
                             num_slots * kSmall.slot_bytes / elem_bytes};
  call.num_elems = random.below(random.choose(limits) + 1);
  call.misalignment = random.below(3) * elem_bytes;
  call.in_heap = random.choose(std::array{uint64_t{0}, ~uint64_t{0}, random.below(16)});
  return call;
}

std::vector<DType> reducible_dtypes() {
  std::vector<DType> dtypes;
  for (size_t i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (info(dtype).is_reducible) dtypes.push_back(dtype);
  }
  return dtypes;
}

std::vector<ReduceOp> defined_ops(DType dtype) {
  std::vector<ReduceOp> ops;
  for (size_t i = 0; i < kNumReduceOps; ++i) {
    if (is_defined(static_cast<ReduceOp>(i), dtype)) ops.push_back(static_cast<ReduceOp>(i));
  }
  return ops;
}

}  // namespace rota::test
