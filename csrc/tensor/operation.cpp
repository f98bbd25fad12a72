#include "tensor/operation.h"

#include <numeric>

#include "base/random_bits.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse(const Operation& operation, ErrorKind kind, const std::string& what) {
  throw Error(kind, join("rota.", name(operation.kind), ": ", what));
}

// The inputs or the outputs of an operation.
struct Side {
  std::string_view what;
  at::TensorList tensors;
  at::IntArrayRef splits;
  bool is_per_rank;
  bool is_used;  // by this rank
};

Side input_side(const Operation& operation, int rank) {
  const CollectiveRow& row = row_of(operation.kind);
  return {"input", operation.inputs, operation.input_splits, row.is_input_per_rank,
          is_among(row.contributors, rank, operation.root)};
}

Side output_side(const Operation& operation, int rank) {
  const CollectiveRow& row = row_of(operation.kind);
  return {"output", operation.outputs, operation.output_splits, row.is_output_per_rank,
          is_among(row.receivers, rank, operation.root)};
}

// The lengths of a checked side's parts.
Lengths lengths_of(const Side& side, int world_size) {
  Lengths lengths;
  if (!side.is_used) return lengths;
  if (side.is_per_rank && side.tensors.size() == 1) {
    if (!side.splits.empty()) return {side.splits.begin(), side.splits.end()};
    const auto num_ranks = static_cast<size_t>(world_size);
    lengths.assign(num_ranks, num_elems(side.tensors[0]) / num_ranks);
    return lengths;
  }
  for (const at::Tensor& tensor : side.tensors) lengths.push_back(num_elems(tensor));
  return lengths;
}

// A side with one tensor for all ranks' parts. part: the length that all must have, if the other
// side knows it.
void check_equal_parts(const Operation& operation, const Side& side, int world_size,
                       std::optional<int64_t> part) {
  const int64_t length = side.tensors[0].numel();
  if (part ? length == *part * world_size : length % world_size == 0) return;
  refuse(operation, ErrorKind::kValue,
         part ? join("the ", side.what, " has ", length, " elements, expected ", world_size, " * ",
                     *part, ", a part for each rank")
              : join("the ", side.what, " has ", length, " elements, which do not divide into ",
                     world_size, " equal parts; pass splits"));
}

void check_splits(const Operation& operation, const Side& side, int world_size) {
  const int64_t length = side.tensors[0].numel();
  if (side.splits.size() != static_cast<size_t>(world_size)) {
    refuse(operation, ErrorKind::kValue,
           join(side.what, " splits have ", side.splits.size(),
                " entries, expected one for each of ", world_size, " ranks"));
  }
  int64_t sum = 0;
  for (const int64_t split : side.splits) {
    if (split < 0) {
      refuse(operation, ErrorKind::kValue,
             join(side.what, " splits contain ", split, ", expected 0 or more"));
    }
    sum += split;
  }
  if (sum != length) {
    refuse(operation, ErrorKind::kValue,
           join(side.what, " splits sum to ", sum, " elements, but the ", side.what, " has ",
                length, "; make them equal"));
  }
}

void check_side(const Operation& operation, const Side& side, int world_size, at::Device device) {
  if (!side.is_used) {
    if (side.tensors.empty()) return;
    refuse(operation, ErrorKind::kValue,
           join("this rank passes an ", side.what, ", expected one on root ", operation.root,
                " only"));
  }
  for (const at::Tensor& tensor : side.tensors) {
    check_tensor(tensor, name(operation.kind), device);
  }
  const size_t num_tensors = side.tensors.size();
  if (num_tensors == 1) {
    if (!side.splits.empty()) check_splits(operation, side, world_size);
    return;
  }
  if (!side.is_per_rank || num_tensors != static_cast<size_t>(world_size)) {
    refuse(operation, ErrorKind::kValue,
           join(num_tensors, " ", side.what, " tensors, expected ",
                side.is_per_rank ? join("world_size = ", world_size) : "one"));
  }
}

void check_same_dtype(const Operation& operation, const Side& side, at::ScalarType dtype) {
  for (const at::Tensor& tensor : side.tensors) {
    if (tensor.scalar_type() == dtype) continue;
    refuse(operation, ErrorKind::kType,
           join("an ", side.what, " is of ", c10::toString(tensor.scalar_type()),
                ", another tensor of ", c10::toString(dtype), "; make them equal"));
  }
}

bool are_equal(const Lengths& lengths) {
  return std::ranges::all_of(lengths, [&](uint64_t length) { return length == lengths[0]; });
}

// Sets the lengths that ranks compare. parts: the side with a part for each rank, of which this
// rank's own must be as long as `single`.
void set_lengths(Call& call, const Operation& operation, const Lengths& parts, uint64_t single,
                 int rank) {
  const uint64_t own = parts[static_cast<size_t>(rank)];
  if (own != single) {
    const bool is_input = row_of(operation.kind).is_input_per_rank;
    refuse(operation, ErrorKind::kValue,
           join("the ", is_input ? "output" : "input", " has ", single, " elements, this rank's ",
                is_input ? "input" : "output", " has ", own, "; make them equal"));
  }
  call.num_elems = single;
  if (are_equal(parts)) return;
  if (row_of(operation.kind).has_root()) {
    refuse(operation, ErrorKind::kValue,
           "parts have different lengths; make them equal, or use send and recv");
  }
  call.num_elems = std::accumulate(parts.begin(), parts.end(), uint64_t{0});
  for (const uint64_t length : parts) call.uneven = mix(call.uneven ^ (length + 1));
  call.uneven |= 1;  // 0 means equal parts
}

DType dtype_of(const Operation& operation) {
  const at::Tensor& tensor = operation.any_tensor();
  if (!row_of(operation.kind).reduces) return movable_dtype(tensor, name(operation.kind));
  const DType dtype = reducible_dtype(tensor.scalar_type(), name(operation.kind));
  if (operation.premul_factor && !is_bucket_dtype(dtype)) {
    refuse(operation, ErrorKind::kType,
           join("PREMUL_SUM of ", name(dtype), ", expected floats of 16, 32 or 64 bits"));
  }
  return dtype;
}

Call plan_in_place(const Operation& operation, const Planner& planner, at::Device device) {
  if (operation.outputs.size() != 1) {
    refuse(operation, ErrorKind::kValue, join(operation.outputs.size(), " tensors, expected one"));
  }
  const at::Tensor& tensor = operation.outputs[0];
  check_tensor(tensor, name(operation.kind), device);
  const DType dtype = dtype_of(operation);
  if (operation.kind == CollectiveKind::kAllReduce) {
    return planner.all_reduce(dtype, num_elems(tensor), operation.reduction);
  }
  return planner.collective(operation.kind, dtype, num_elems(tensor), operation.reduction.op,
                            operation.root, std::nullopt, operation.reduction.order);
}

void check_companion(const at::Tensor& tensor, std::string_view what, at::ScalarType dtype,
                     int64_t num_elems, const at::Tensor& bucket) {
  check_tensor(tensor, "reduce_bucket", bucket.device());
  if (tensor.scalar_type() != dtype || tensor.numel() != num_elems || !tensor.is_contiguous()) {
    throw Error(ErrorKind::kValue,
                join("rota.reduce_bucket: ", what, " has ", tensor.numel(), " elements of ",
                     c10::toString(tensor.scalar_type()),
                     tensor.is_contiguous() ? "" : " and is not contiguous", ", expected ",
                     num_elems, " contiguous ones of ", c10::toString(dtype)));
  }
  if (overlap(tensor, bucket)) {
    throw Error(ErrorKind::kValue, join("rota.reduce_bucket: ", what,
                                        " shares memory with the bucket; give it its own"));
  }
}

}  // namespace

const at::Tensor& Operation::any_tensor() const {
  static const at::Tensor none;
  if (!outputs.empty()) return outputs[0];
  return inputs.empty() ? none : inputs[0];
}

OwnedOperation::OwnedOperation(const Operation& operation)
    : operation_(operation),
      inputs_(operation.inputs.vec()),
      outputs_(operation.outputs.vec()),
      input_splits_(operation.input_splits.vec()),
      output_splits_(operation.output_splits.vec()) {
  for (const at::TensorList tensors : {operation.inputs, operation.outputs}) {
    for (const at::Tensor& tensor : tensors) memory_.push_back(tensor.storage());
  }
}

Operation OwnedOperation::view() const {
  Operation view = operation_;
  view.inputs = inputs_;
  view.outputs = outputs_;
  view.input_splits = input_splits_;
  view.output_splits = output_splits_;
  return view;
}

Call plan(const Operation& operation, const Planner& planner, int rank, at::Device device) {
  const CollectiveRow& row = row_of(operation.kind);
  const int world_size = planner.world_size();
  if (operation.kind == CollectiveKind::kBarrier) return {.kind = operation.kind};
  if (row.is_in_place) return plan_in_place(operation, planner, device);

  planner.check_root(operation.kind, operation.root);
  const Side inputs = input_side(operation, rank);
  const Side outputs = output_side(operation, rank);
  check_side(operation, inputs, world_size, device);
  check_side(operation, outputs, world_size, device);
  const at::ScalarType dtype = operation.any_tensor().scalar_type();
  check_same_dtype(operation, inputs, dtype);
  check_same_dtype(operation, outputs, dtype);

  for (const auto& [side, other] : {std::pair(inputs, outputs), std::pair(outputs, inputs)}) {
    if (!side.is_used || !side.is_per_rank || side.tensors.size() != 1 || !side.splits.empty()) {
      continue;
    }
    check_equal_parts(operation, side, world_size,
                      other.is_per_rank ? std::nullopt : std::optional(other.tensors[0].numel()));
  }

  Call call = planner.collective(operation.kind, dtype_of(operation), 0, operation.reduction.op,
                                 operation.root, operation.wire, operation.reduction.order);
  const Lengths input_lengths = lengths_of(inputs, world_size);
  const Lengths output_lengths = lengths_of(outputs, world_size);
  if (row.is_input_per_rank && row.is_output_per_rank) {
    // Ranks compare the parts of each pair (cpu/all_to_all.cpp).
    const auto own = static_cast<size_t>(rank);
    if (input_lengths[own] == output_lengths[own]) return call;
    refuse(operation, ErrorKind::kValue,
           join("this rank's part of the input has ", input_lengths[own],
                " elements, of the output ", output_lengths[own], "; make them equal"));
  }
  const Lengths& parts = row.is_input_per_rank ? input_lengths : output_lengths;
  const Lengths& single = row.is_input_per_rank ? output_lengths : input_lengths;
  if (parts.empty()) {
    call.num_elems = single[0];
  } else {
    set_lengths(call, operation, parts, single[0], rank);
  }
  return call;
}

Call plan(const BucketTensors& tensors, const Planner& planner, const BucketOptions& options) {
  const at::Tensor& bucket = tensors.bucket;
  check_tensor(bucket, "reduce_bucket", bucket.device());
  check_companion(tensors.stats, "stats", at::kDouble, 2, bucket);
  if (tensors.residual) {
    check_companion(*tensors.residual, "residual", at::kFloat, bucket.numel(), bucket);
  }
  const DType dtype =
      known_dtype(bucket.scalar_type(), "reduce_bucket", "the bucket's dtype", is_bucket_dtype);
  return planner.reduce_bucket(dtype, num_elems(bucket), options);
}

namespace {

// A tensor of several operations.
struct Place {
  ByteRange range;
  const at::Tensor* tensor;
  size_t operation;
  bool is_output;
};

bool must_be_apart(const Place& one, const Place& other) {
  if (one.operation == other.operation) return one.is_output && other.is_output;
  return one.is_output || other.is_output;
}

}  // namespace

void check_all_apart(at::ArrayRef<Operation> operations) {
  std::vector<Place> places;
  for (size_t i = 0; i < operations.size(); ++i) {
    for (const at::Tensor& tensor : operations[i].outputs) {
      places.push_back({range_of(tensor), &tensor, i, /*is_output=*/true});
    }
    for (const at::Tensor& tensor : operations[i].inputs) {
      places.push_back({range_of(tensor), &tensor, i, /*is_output=*/false});
    }
  }
  std::ranges::sort(places, std::ranges::less(),
                    [](const Place& place) { return place.range.begin; });
  for (size_t i = 0; i < places.size(); ++i) {
    const std::byte* end = places[i].range.end;
    for (size_t j = i + 1; j < places.size() && places[j].range.begin < end; ++j) {
      if (!must_be_apart(places[i], places[j])) continue;
      if (!overlap(*places[i].tensor, *places[j].tensor)) continue;
      refuse(operations[0], ErrorKind::kValue,
             places[i].operation == places[j].operation
                 ? "two outputs share memory, expected one for each rank; give each its own"
                 : "tensors of several calls that are made as one share memory; give each its own");
    }
  }
}

void check_messages_apart(at::TensorList sent, at::TensorList received) {
  std::vector<Operation> messages;
  for (const at::Tensor& tensor : sent) {
    messages.push_back({.kind = CollectiveKind::kSendRecv, .inputs = tensor});
  }
  for (const at::Tensor& tensor : received) {
    messages.push_back({.kind = CollectiveKind::kSendRecv, .outputs = tensor});
  }
  check_apart(messages);
}

void check_unchanged(const Call& planned, c10::function_ref<Call()> replan,
                     c10::function_ref<void(const Call&)> agree) {
  try {
    if (replan() == planned) return;
    throw Error(ErrorKind::kValue,
                join("rota.", planned.kind_name(),
                     ": a tensor was resized or replaced between the call and its start; wait for "
                     "the call's work before"));
  } catch (const Error&) {
    Call withdrawn = planned;
    withdrawn.is_withdrawn = true;
    try {
      agree(withdrawn);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMismatch) throw;
    }
    throw;
  }
}

Lengths input_lengths(const Operation& operation, int rank, int world_size) {
  return lengths_of(input_side(operation, rank), world_size);
}

Lengths output_lengths(const Operation& operation, int rank, int world_size) {
  return lengths_of(output_side(operation, rank), world_size);
}

::c10d::OpType op_type_of(CollectiveKind kind) {
  using enum ::c10d::OpType;
  static constexpr ::c10d::OpType kByKind[] = {
      ALLREDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, REDUCE, REDUCE_SCATTER, BROADCAST,
      ALLGATHER, GATHER,    SCATTER,        ALLTOALL,  SEND,   BARRIER};
  static_assert(std::size(kByKind) == kCollectives.size());
  return kByKind[static_cast<size_t>(kind)];
}

}  // namespace rota::tensors
