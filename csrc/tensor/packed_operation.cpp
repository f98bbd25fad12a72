#include "tensor/packed_operation.h"

#include "tensor/collectives.h"

namespace rota::tensors {

PackedSide::PackedSide(at::TensorList tensors, c10::ArrayRef<uint64_t> lengths,
                       Packed::Content content, std::optional<double> factor) {
  for (const at::Tensor& tensor : tensors) packed_.emplace_back(tensor, content, factor);
  for (const uint64_t length : lengths) parts_.push_back({nullptr, length});
  place_parts();
}

void PackedSide::place_parts() {
  const bool is_one_tensor = packed_.size() < parts_.size();
  std::byte* end = nullptr;  // of the parts before
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (i == 0 || !is_one_tensor) end = static_cast<std::byte*>(packed_[i].data());
    parts_[i].data = end;
    end += parts_[i].num_elems * packed_[0].tensor().element_size();
  }
}

ByteRange PackedSide::range_of(size_t part) const {
  const auto* begin = static_cast<const std::byte*>(parts_[part].data);
  return {begin, begin + parts_[part].num_elems * packed_[0].tensor().element_size()};
}

void PackedSide::set_aside() {
  for (Packed& packed : packed_) packed.set_aside();
  place_parts();
}

void PackedSide::unpack() const {
  for (const Packed& packed : packed_) packed.unpack();
}

namespace {

ByteRange hull_of(const PackedSide& side) {
  ByteRange hull = side.range_of(0);
  for (size_t part = 1; part < side.num_parts(); ++part) {
    const ByteRange range = side.range_of(part);
    hull = {std::min(hull.begin, range.begin), std::max(hull.end, range.end)};
  }
  return hull;
}

// Whether they share bytes beside this rank's own part in the same place.
bool overlap_elsewhere(const CollectiveRow& row, const PackedSide& inputs,
                       const PackedSide& outputs, int rank) {
  if (outputs.num_parts() == 0) return false;
  const ByteRange all_outputs = hull_of(outputs);
  const auto own = static_cast<size_t>(rank);
  for (size_t i = 0; i < inputs.num_parts(); ++i) {
    const ByteRange input = inputs.range_of(i);
    if (!overlap(input, all_outputs)) continue;  // most
    for (size_t j = 0; j < outputs.num_parts(); ++j) {
      const ByteRange output = outputs.range_of(j);
      if (!overlap(input, output)) continue;
      const bool is_own =
          (i == own || !row.is_input_per_rank) && (j == own || !row.is_output_per_rank);
      if (!is_own || input.begin != output.begin) return true;
    }
  }
  return false;
}

}  // namespace

PackedOperation::PackedOperation(const Operation& operation, int rank, int world_size)
    : inputs_(operation.inputs, input_lengths(operation, rank, world_size), Packed::Content::kRead,
              operation.premul_factor),
      outputs_(operation.outputs, output_lengths(operation, rank, world_size),
               Packed::Content::kOverwritten) {
  const CollectiveRow& row = row_of(operation.kind);
  if (!overlap_elsewhere(row, inputs_, outputs_, rank)) return;
  (row.is_output_per_rank ? inputs_ : outputs_).set_aside();
}

void run_on_cpu(const Operation& operation, const Call& call, int rank, int world_size,
                c10::function_ref<void(const cpu::Buffers&)> run) {
  const CollectiveRow& row = row_of(operation.kind);
  if (operation.kind == CollectiveKind::kBarrier) return run({});
  if (row.is_in_place) {
    const bool contributes = is_among(row.contributors, rank, call.root);
    const Packed packed(operation.outputs[0],
                        contributes ? Packed::Content::kRead : Packed::Content::kOverwritten,
                        operation.premul_factor);
    run({.data = packed.data()});
    if (is_among(row.receivers, rank, call.root)) packed.unpack();
    return;
  }
  const PackedOperation packed(operation, rank, world_size);
  run(packed.buffers());
  packed.unpack();
}

void run_bucket(const BucketTensors& tensors, const std::function<void(const cpu::Buffers&)>& run) {
  const Packed packed(tensors.bucket, Packed::Content::kRead);
  cpu::BucketMeasures measures(num_elems(tensors.bucket));
  run({.data = packed.data(),
       .residual = tensors.residual ? tensors.residual->data_ptr<float>() : nullptr,
       .measures = &measures});
  packed.unpack();
  auto* values = tensors.stats.data_ptr<double>();
  values[0] = static_cast<double>(measures.num_non_finite);
  values[1] = measures.sum_of_squares();
}

}  // namespace rota::tensors
