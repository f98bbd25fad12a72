#include "tensor/sharded_bucket.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/exact_sum.h"
#include "base/random_bits.h"
#include "tensor/tensor_checks.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

constexpr std::string_view kName = "rota.ShardedBucket: ";

[[noreturn]] void refuse(const std::string& what, ErrorKind kind = ErrorKind::kValue) {
  throw Error(kind, join(kName, what));
}

schedule::Pieces pieces_of(const at::Tensor& rows, int world_size) {
  constexpr int64_t kNumColumns = 4;
  check_tensor(rows, "ShardedBucket");
  if (rows.scalar_type() != at::kLong || rows.dim() != 2 || rows.size(1) != kNumColumns ||
      !rows.is_contiguous()) {
    refuse("pieces is no contiguous int64 tensor of rows of 4");
  }
  std::vector<schedule::Piece> pieces;
  uint64_t end = 0;
  const auto* row = rows.data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i, row += kNumColumns) {
    if (static_cast<uint64_t>(row[0]) != end || row[1] <= 0 || row[2] < 0 || row[2] >= world_size ||
        row[3] < 0) {
      refuse(join("piece ", i, " does not follow the one before, is empty, or has no such owner"));
    }
    pieces.push_back({static_cast<uint64_t>(row[0]), static_cast<uint64_t>(row[1]),
                      static_cast<int>(row[2]), static_cast<uint64_t>(row[3])});
    end += static_cast<uint64_t>(row[1]);
  }
  return {std::move(pieces), world_size};
}

// The squares of the rank's pieces, leaf by leaf. What is not finite is left out.
ExactSum sum_of_squares(const schedule::Pieces& pieces, int rank,
                        const cpu::BucketMeasures& measures) {
  ExactSum sum;
  size_t tile = 0;
  for (const schedule::Piece& piece : pieces.all()) {
    if (piece.owner != rank) continue;
    const size_t end = tile + schedule::ceil_div(piece.num_elems, kTileElems);
    while (tile < end) {
      double leaf[kTreeGroup] = {};
      for (size_t i = 0; i < kTreeGroup && tile < end; ++i) leaf[i] = measures.squares[tile++];
      const double squares = sum_in_pairs<kTreeGroup>(leaf);
      if (std::isfinite(squares)) sum.add(squares);
    }
  }
  return sum;
}

// What the ranks must agree on, of all pieces.
uint64_t digest_of(const cpu::UpdateSteps& steps) {
  uint64_t digest = steps.size();
  const auto add = [&](uint64_t word) { digest = mix(digest ^ word); };
  for (const std::optional<cpu::UpdateStep>& step : steps) {
    add(step.has_value());
    if (!step) continue;
    add(static_cast<uint64_t>(step->kind) | uint64_t{step->is_nesterov} << 8 |
        uint64_t{step->is_first} << 16);
    for (const float value :
         {step->gradient_factor, step->l2, step->kept, step->size, step->momentum, step->fresh,
          step->beta2, step->fresh_square, step->correction, step->eps}) {
      add(std::bit_cast<uint32_t>(value));
    }
  }
  return digest;
}

float* floats_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->data_ptr<float>() : nullptr;
}

}  // namespace

ShardedBucket::ShardedBucket(std::vector<at::Tensor> parameters, const at::Tensor& pieces, int rank,
                             int world_size)
    : parameters_(std::move(parameters)),
      pieces_(pieces_of(pieces, world_size)),
      rank_(rank),
      states_(pieces_.all().size()) {
  uint64_t end = 0;
  size_t parameter = 0;
  for (const schedule::Piece& piece : pieces_.all()) {
    while (parameter < parameters_.size() &&
           piece.begin >= end + num_elems(parameters_[parameter])) {
      end += num_elems(parameters_[parameter++]);
    }
    if (parameter == parameters_.size() ||
        piece.begin + piece.num_elems > end + num_elems(parameters_[parameter])) {
      refuse("a piece lies in no parameter, or in two");
    }
    parameter_of_.push_back(parameter);
    offset_.push_back(piece.begin - end);
  }
  check_parameters();
  sums_ = at::zeros({static_cast<int64_t>(pieces_.row_elems(rank))}, at::kFloat);
}

void ShardedBucket::check_parameters() const {
  for (const at::Tensor& parameter : parameters_) {
    check_tensor(parameter, "ShardedBucket");
    if (parameter.scalar_type() != parameters_[0].scalar_type() ||
        !parameter.is_non_overlapping_and_dense()) {
      refuse("parameters have different dtypes, or gaps in their memory", ErrorKind::kType);
    }
  }
}

void ShardedBucket::set_state(size_t piece, const State& state) {
  if (piece >= states_.size() || pieces_.all()[piece].owner != rank_) {
    refuse(join("piece ", piece, " is not this rank's"));
  }
  for (const auto& tensor : {state.parameters, state.momentum, state.squares, state.largest}) {
    if (!tensor) continue;
    check_tensor(*tensor, "ShardedBucket");
    if (tensor->scalar_type() != at::kFloat || !tensor->is_contiguous() ||
        num_elems(*tensor) != pieces_.all()[piece].num_elems) {
      refuse(join("a state of piece ", piece, " is not ", pieces_.all()[piece].num_elems,
                  " contiguous float32"));
    }
  }
  states_[piece] = state;
}

Call ShardedBucket::plan_reduction(const BucketTensors& tensors, const Planner& planner,
                                   const BucketOptions& options) const {
  const auto& [bucket, stats, residual] = tensors;
  const auto is_right = [](const at::Tensor& tensor, at::ScalarType dtype, uint64_t length) {
    check_tensor(tensor, "reduce_shards");
    return tensor.scalar_type() == dtype && tensor.is_contiguous() && num_elems(tensor) == length;
  };
  const uint64_t length = pieces_.num_elems();
  if (!is_right(bucket, bucket.scalar_type(), length) ||
      (residual && !is_right(*residual, at::kFloat, length)) ||
      !is_right(stats, at::kLong, 1 + ExactSum::kNumWords)) {
    throw Error(ErrorKind::kValue,
                join("rota.reduce_shards: expected a contiguous bucket and residual of ", length,
                     " elements, and stats of ", 1 + ExactSum::kNumWords, " int64"));
  }
  const DType dtype =
      known_dtype(bucket.scalar_type(), "reduce_shards", "the bucket's dtype", is_bucket_dtype);
  Call call = planner.reduce_bucket(dtype, length, options);
  call.kind = CollectiveKind::kReduceShards;
  call.algorithm = {};
  call.uneven = pieces_.digest();
  return call;
}

Call ShardedBucket::plan_update(const cpu::UpdateSteps& steps) const {
  check_parameters();
  if (steps.size() != states_.size()) refuse("there is not one step for each piece");
  const DType dtype = known_dtype(parameters_[0].scalar_type(), "update_shards",
                                  "the parameters' dtype", is_bucket_dtype);
  for (size_t i = 0; i < states_.size(); ++i) {
    if (pieces_.all()[i].owner != rank_ || !steps[i]) continue;
    const bool is_adam = steps[i]->kind == cpu::UpdateStep::Kind::kAdam;
    if ((dtype != DType::kFloat32 && !states_[i].parameters) ||
        (is_adam && (!states_[i].momentum || !states_[i].squares))) {
      refuse(join("piece ", i, " has no state"));
    }
  }
  return {.kind = CollectiveKind::kUpdateShards,
          .dtype = dtype,
          .num_elems = pieces_.num_elems(),
          .uneven = mix(pieces_.digest() ^ digest_of(steps))};
}

void ShardedBucket::run_reduction(const BucketTensors& tensors,
                                  const std::function<void(const cpu::Buffers&)>& run) const {
  cpu::BucketMeasures measures(pieces_.row_elems(rank_));
  run({.data = tensors.bucket.data_ptr(),
       .residual = floats_of(tensors.residual),
       .measures = &measures,
       .pieces = &pieces_,
       .sums = sums_.data_ptr<float>()});
  auto* words = reinterpret_cast<uint64_t*>(tensors.stats.data_ptr<int64_t>());
  words[0] = measures.num_non_finite;
  const ExactSum sum = sum_of_squares(pieces_, rank_, measures);
  std::ranges::copy(sum.words(), words + 1);
}

std::byte* ShardedBucket::data_of(size_t piece) const {
  const at::Tensor& parameter = parameters_[parameter_of_[piece]];
  return static_cast<std::byte*>(parameter.data_ptr()) + offset_[piece] * parameter.element_size();
}

void ShardedBucket::run_update(cpu::UpdateSteps steps,
                               const std::function<void(const cpu::Buffers&)>& run) const {
  cpu::ShardUpdate update{.steps = std::move(steps)};
  for (size_t i = 0; i < states_.size(); ++i) {
    update.data.push_back(data_of(i));
    const State& state = states_[i];
    update.states.push_back({.gradients = nullptr,
                             .parameters = floats_of(state.parameters),
                             .momentum = floats_of(state.momentum),
                             .squares = floats_of(state.squares),
                             .largest = floats_of(state.largest)});
  }
  run({.pieces = &pieces_, .sums = sums_.data_ptr<float>(), .update = &update});
}

}  // namespace rota::tensors
