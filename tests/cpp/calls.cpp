#include "calls.h"

#include <unistd.h>

#include <bitset>
#include <memory>
#include <thread>

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
    const size_t size = call.misalignment + num_bytes();
    if ((call.in_heap >> rank & 1) != 0) {
      auto& heap = per_process<transport::Heap>();
      bytes_.reset(static_cast<std::byte*>(heap.allocate(size)),
                   [&heap](std::byte* bytes) { heap.release(bytes); });
    } else {
      bytes_.reset(new std::byte[size](), std::default_delete<std::byte[]>());
    }
  }
  // A part of it, in the same memory.
  Tensor part(uint64_t begin, uint64_t num_elems) const {
    Tensor part = *this;
    part.bytes_ = {bytes_, bytes_.get() + begin * info(dtype_).num_bytes};
    part.num_elems_ = num_elems;
    return part;
  }

  // Null for an empty tensor, as in torch.
  void* data() { return num_elems_ == 0 ? nullptr : bytes_.get() + misalignment_; }
  uint64_t num_elems() const { return num_elems_; }
  size_t num_bytes() const { return num_elems_ * info(dtype_).num_bytes; }
  uint64_t get(uint64_t elem) { return load_bits(dtype_, data(), elem); }
  template <typename BitsOf>
  void fill(const BitsOf& bits_of) {
    for (uint64_t i = 0; i < num_elems_; ++i) store_bits(dtype_, data(), i, bits_of(i));
  }

 private:
  DType dtype_;
  uint64_t num_elems_;
  size_t misalignment_;
  std::shared_ptr<std::byte> bytes_;
};

// The stream of numbers that `from` has for `to`.
int pair_of(int from, int to) { return from * kMaxWorldSize + to; }

class TestedCall {
 public:
  TestedCall(const Caller& caller, const TestCall& call, uint64_t seed)
      : caller_(caller), call_(call), seed_(seed) {}

  void all_reduce();
  void reduce_bucket();
  void reduce_scatter();
  void broadcast();
  void copy_parts();

 private:
  int rank() const { return caller_.rank; }
  int world_size() const { return caller_.world_size; }

  Call plan() const;
  Call with_levels(Call planned) const;

  int64_t contribution(int stream, uint64_t elem) const {
    return exact_integer(call_.wire.value_or(call_.dtype), call_.op, world_size(),
                         hash(seed_, stream, elem));
  }
  uint64_t bits_of(int stream, uint64_t elem) const {
    return bits_of_integer(call_.dtype, contribution(stream, elem));
  }
  uint64_t byte_of(int stream, uint64_t index) const;
  // What all ranks contribute to an element, reduced. It is exact in any order, so one result
  // serves every algorithm and wire dtype.
  template <typename StreamOf>
  uint64_t reduced(uint64_t elem, const StreamOf& stream_of) {
    srcs_.clear();
    for (int from = 0; from < world_size(); ++from) srcs_.push_back(bits_of(stream_of(from), elem));
    return reduce_scalars(call_.dtype, call_.op, srcs_, world_size());
  }

  Tensor make_bytes(uint64_t num_elems) const {
    return {call_, DType::kUInt8, num_elems * info(call_.dtype).num_bytes, rank()};
  }
  void fill_bytes(Tensor& tensor, int stream) const {
    tensor.fill([&](uint64_t i) { return byte_of(stream, i); });
  }
  std::vector<cpu::Part> parts_of(std::vector<Tensor>& tensors) const {
    std::vector<cpu::Part> parts;
    for (Tensor& tensor : tensors) {
      parts.push_back({tensor.data(), tensor.num_bytes() / info(call_.dtype).num_bytes});
    }
    return parts;
  }
  template <typename BitsOf>
  void check_all(Tensor& tensor, const BitsOf& bits_of) const {
    for (uint64_t i = 0; i < tensor.num_elems(); ++i) {
      if (tensor.get(i) == bits_of(i)) continue;
      fail(join("rank ", rank(), ", ", call_.to_string(), ": element ", i, " has bits ",
                tensor.get(i), ", expected ", bits_of(i)));
    }
  }

  const Caller& caller_;
  const TestCall& call_;
  uint64_t seed_;
  std::vector<uint64_t> srcs_;
};

Call TestedCall::plan() const {
  const Planner planner(world_size());
  if (call_.kind != CollectiveKind::kAllReduce) {
    const auto wire =
        call_.wire ? std::optional(WireFormat{*call_.wire, call_.block_scaling}) : std::nullopt;
    return planner.collective(call_.kind, call_.dtype, call_.num_elems, call_.op, call_.root, wire);
  }
  return planner.all_reduce(
      call_.dtype, call_.num_elems,
      {.op = call_.op, .algorithm = call_.algorithm, .wire = call_.wire, .hop = call_.hop});
}

// A sum of numbers that are exact in any order, in the order of its nodes.
Call TestedCall::with_levels(Call planned) const {
  if (call_.node_size == 0) return planned;
  planned.algorithm = schedule::Algorithm::kTwoLevel;
  planned.node_size = call_.node_size;
  planned.order = {.group_size = call_.node_size};
  return planned;
}

// And reduce, which leaves the tensors of all ranks but the root as they are.
void TestedCall::all_reduce() {
  Tensor tensor(call_, call_.dtype, call_.num_elems, rank());
  tensor.fill([&](uint64_t i) { return bits_of(rank(), i); });
  caller_.run(with_levels(plan()), {.data = tensor.data()});
  const bool receives = is_among(row_of(call_.kind).receivers, rank(), call_.root);
  check_all(tensor, [&](uint64_t i) {
    return receives ? reduced(i, [](int from) { return from; }) : bits_of(rank(), i);
  });
}

// An average of numbers that are exact in every wire dtype, with or without block scaling.
void TestedCall::reduce_bucket() {
  Tensor tensor(call_, call_.dtype, call_.num_elems, rank());
  tensor.fill([&](uint64_t i) { return bits_of(rank(), i); });
  // Every other seed uses error feedback; the residual must stay 0, because nothing is rounded.
  std::vector<float> residual(seed_ % 2 == 0 ? call_.num_elems : 0);
  const BucketOptions options{.wire = {*call_.wire, call_.block_scaling},
                              .pass = {.divisor = static_cast<float>(world_size()) / 2,
                                       .result_factor = 0.5f,
                                       .has_residual = !residual.empty()},
                              .algorithm = call_.algorithm};
  const Call planned =
      with_levels(Planner(world_size()).reduce_bucket(call_.dtype, call_.num_elems, options));
  cpu::BucketMeasures measures(call_.num_elems);
  caller_.run(planned, {.data = tensor.data(), .residual = residual.data(), .measures = &measures});
  double squares = 0;
  check_all(tensor, [&](uint64_t i) {
    int64_t sum = 0;
    for (int from = 0; from < world_size(); ++from) sum += contribution(from, i);
    const int64_t average = sum / world_size();
    squares += static_cast<double>(average * average);
    return bits_of_integer(call_.dtype, average);
  });
  for (const float lost : residual) check_equal(lost, 0.0f, "what rounding lost");
  check_equal(measures.sum_of_squares(), squares, "the sum of squares");
  check_equal(measures.num_non_finite, 0, "the number of non-finite elements");
}

// Sums of a part for each rank, which every other seed makes unequal.
void TestedCall::reduce_scatter() {
  const bool is_uneven = seed_ % 2 == 0;
  const auto length_of = [&](int owner) {
    return is_uneven ? call_.num_elems * static_cast<uint64_t>(owner % 3) / 2 : call_.num_elems;
  };
  // Parts of one tensor can be read in place.
  const bool is_one_tensor = seed_ % 3 != 0;
  uint64_t total = 0;
  for (int owner = 0; owner < world_size(); ++owner) total += length_of(owner);
  const Tensor whole(call_, call_.dtype, is_one_tensor ? total : 0, rank());
  std::vector<Tensor> inputs;
  uint64_t begin = 0;
  for (int owner = 0; owner < world_size(); ++owner) {
    const uint64_t length = length_of(owner);
    inputs.push_back(is_one_tensor ? whole.part(begin, length)
                                   : Tensor(call_, call_.dtype, length, rank()));
    inputs.back().fill([&](uint64_t i) { return bits_of(pair_of(rank(), owner), i); });
    begin += length;
  }
  Tensor sum(call_, call_.dtype, length_of(rank()), rank());
  const cpu::Part output{sum.data(), sum.num_elems()};
  Call planned = plan();
  if (is_uneven) planned.uneven = seed_ + 1;
  caller_.run(planned, {.inputs = parts_of(inputs).data(), .outputs = &output});
  check_all(
      sum, [&](uint64_t i) { return reduced(i, [&](int from) { return pair_of(from, rank()); }); });
}

// Collectives that do not reduce are compared byte by byte, for elements of any size. Elements that
// travel in a wire format are numbers that are exact in it.
uint64_t TestedCall::byte_of(int stream, uint64_t index) const {
  if (!call_.wire) return hash(seed_, stream, index) & 0xff;
  const size_t elem_bytes = info(call_.dtype).num_bytes;
  std::byte elem[sizeof(double)];
  store_bits(call_.dtype, elem, 0, bits_of(stream, index / elem_bytes));
  return static_cast<uint64_t>(elem[index % elem_bytes]);
}

void TestedCall::broadcast() {
  Tensor tensor = make_bytes(call_.num_elems);
  fill_bytes(tensor, rank());
  caller_.run(plan(), {.data = tensor.data()});
  check_all(tensor, [&](uint64_t i) { return byte_of(call_.root, i); });
}

// all_gather, gather, scatter and all_to_all: rank `from` has a part for rank `to`, unless it sends
// the same to all. Every third seed gives the parts of all_gather and all_to_all different lengths.
void TestedCall::copy_parts() {
  const CollectiveRow& row = row_of(call_.kind);
  const bool is_uneven = seed_ % 3 == 0 && !row.has_root();
  // Short parts travel with the post, while those of other ranks need rounds.
  const auto length_of = [&](int from, int to) {
    if (!is_uneven) return call_.num_elems;
    if (from == 0) return call_.num_elems / 64;
    return call_.num_elems * static_cast<uint64_t>((from + (row.is_input_per_rank ? to : 0)) % 4) /
           2;
  };
  const auto stream_of = [&](int from, int to) {
    return row.is_input_per_rank ? pair_of(from, to) : from;
  };
  const int num_inputs = row.is_input_per_rank ? world_size() : 1;
  const int num_outputs = row.is_output_per_rank ? world_size() : 1;
  const auto sender_of = [&](int output) { return row.is_output_per_rank ? output : call_.root; };
  // What is to be scattered lies, with every other seed, in one tensor, as which peers can read it
  // in place.
  const bool is_one_tensor = call_.kind == CollectiveKind::kScatter && seed_ % 2 == 0;
  const Tensor whole =
      make_bytes(is_one_tensor ? call_.num_elems * static_cast<uint64_t>(num_inputs) : 0);
  std::vector<Tensor> inputs, outputs;
  for (int to = 0; to < num_inputs; ++to) {
    inputs.push_back(make_bytes(length_of(rank(), to)));
    if (is_one_tensor) {
      const uint64_t num_bytes = inputs.back().num_bytes();
      inputs.back() = whole.part(static_cast<uint64_t>(to) * num_bytes, num_bytes);
    }
    fill_bytes(inputs.back(), stream_of(rank(), to));
  }
  for (int i = 0; i < num_outputs; ++i) {
    outputs.push_back(make_bytes(length_of(sender_of(i), rank())));
  }
  std::vector<cpu::Part> input_parts = parts_of(inputs), output_parts = parts_of(outputs);
  // Every other seed runs all_gather in place: the input is the own part of the output.
  const bool is_in_place = call_.kind == CollectiveKind::kAllGather && seed_ % 2 == 0;
  if (is_in_place) {
    const auto own = static_cast<size_t>(rank());
    fill_bytes(outputs[own], rank());
    input_parts[0] = output_parts[own];
  }
  Call planned = plan();
  if (is_uneven && call_.kind == CollectiveKind::kAllGather) planned.uneven = seed_;
  if (call_.kind == CollectiveKind::kAllToAll) planned.num_elems = 0;
  caller_.run(planned, {.inputs = input_parts.data(), .outputs = output_parts.data()});
  if (!is_among(row.receivers, rank(), call_.root)) return;
  for (int i = 0; i < num_outputs; ++i) {
    check_all(outputs[static_cast<size_t>(i)],
              [&](uint64_t byte) { return byte_of(stream_of(sender_of(i), rank()), byte); });
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
  TestedCall checked(caller, call, seed);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      return checked.all_reduce();
    case CollectiveKind::kReduceBucket:
      return checked.reduce_bucket();
    case CollectiveKind::kBroadcast:
      return checked.broadcast();
    case CollectiveKind::kReduceScatter:
      return checked.reduce_scatter();
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
      return checked.copy_parts();
    case CollectiveKind::kReduceShards:
    case CollectiveKind::kUpdateShards:  // shards_cases.cpp
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
  constexpr DType kPackedDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16};
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
    call.dtype = random.choose(kPackedDTypes);
    call.wire = random.choose(std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                         DType::kFloat8E4M3, DType::kFloat8E5M2});
  } else if (call.kind == kAllGather && random.below(2) == 0) {
    call.dtype = random.choose(kPackedDTypes);
    call.wire = random.choose(
        std::array{DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
  } else {
    call.dtype = static_cast<DType>(random.below(kNumDTypes));
  }
  if (call.wire) call.block_scaling = has_block_scaling(*call.wire) && random.below(3) > 0;
  if (random.below(5) > 0) call.algorithm = random.choose(kAlgorithms);
  if (call.kind == kAllReduce && call.dtype == DType::kFloat32 && random.below(2) == 0) {
    call.wire = random.choose(std::array{DType::kFloat16, DType::kBFloat16});
    if (call.algorithm == schedule::Algorithm::kRing && random.below(2) == 0) call.hop = call.wire;
  }
  call.root = random.below(world_size);
  const size_t elem_bytes = info(call.dtype).num_bytes;
  // More rounds than the call has slots.
  const uint64_t num_slots =
      2 + (row_of(call.kind).reduces ? transport::kNumSlots : transport::kNumCopySlots);
  const uint64_t limits[] = {16, kSmall.message_bytes / elem_bytes, kSmall.slot_bytes / elem_bytes,
                             num_slots * kSmall.slot_bytes / elem_bytes};
  call.num_elems = random.below(random.choose(limits) + 1);
  call.misalignment = random.below(3) * elem_bytes;
  call.in_heap = random.choose(std::array{uint64_t{0}, ~uint64_t{0}, random.below(uint64_t{16})});
  return call;
}

void call_until_aborted(int rank, int world_size, int group, int most_us,
                        const std::function<void(const char*)>& abort,
                        const std::function<void(const TestCall&, uint64_t)>& call) {
  constexpr const char* kWhy = "at some moment";
  std::jthread other;
  if (rank == group % world_size) {
    other = std::jthread([&] {
      usleep(static_cast<useconds_t>(Random(group).below(most_us)));
      abort(kWhy);
    });
  }
  Random same_on_all_ranks(group);
  try {
    for (uint64_t seed = 0;; ++seed) {
      TestCall next = random_call(same_on_all_ranks, world_size);
      next.in_heap = 0;  // peers may read it after an abort, see heap_cases.cpp
      call(next, seed);
    }
  } catch (const Error& error) {
    check_contains(error.what(), kWhy);
  }
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
