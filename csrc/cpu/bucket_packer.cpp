#include "cpu/bucket_packer.h"

#include <cmath>

#include "base/random_bits.h"

namespace rota::cpu {
namespace {

bool is_power_of_two(float value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5f;
}

}  // namespace

float exact_factor(float divisor) { return is_power_of_two(divisor) ? 1 / divisor : 1; }

void divide_unless_exact(float* sums, size_t num_elems, float divisor) {
  if (is_power_of_two(divisor)) return;
  for (size_t i = 0; i < num_elems; ++i) sums[i] /= divisor;
}

void measure(BucketMeasures& measures, uint64_t tile, const float* results, size_t num_elems) {
  const double squares = element_loops().sum_of_squares(results, num_elems);
  measures.squares[tile] = squares;
  if (std::isfinite(squares)) return;
  for (size_t i = 0; i < num_elems; ++i) measures.num_non_finite += !std::isfinite(results[i]);
}

BucketPacker::BucketPacker(const Call& call, const Buffers& buffers, int rank)
    : data_(static_cast<const std::byte*>(buffers.data)),
      dtype_(call.dtype),
      pass_(call.pass),
      residual_(buffers.residual),
      rank_(rank),
      loops_(element_loops()),
      wire_loops_(loops_.wire(call.wire)) {}

void BucketPacker::encode(const float* src, const WirePlace& wire, size_t num_elems, float factor,
                          const TileKey& key) const {
  if (!pass_.stochastic_seed) return wire_loops_.encode(src, wire, num_elems, factor);
  wire_loops_.encode_at_random(
      src, wire, num_elems, factor,
      tile_key(*pass_.stochastic_seed, static_cast<uint64_t>(key.stream), key.number));
}

void BucketPacker::pack(const schedule::Range& tile, uint64_t number, const WirePlace& wire) const {
  TileFloats converted;
  const std::byte* data = data_ + tile.begin * info(dtype_).num_bytes;
  const auto* gradients = reinterpret_cast<const float*>(data);
  if (dtype_ != DType::kFloat32) {
    loops_.convert(dtype_, DType::kFloat32)(data, converted.values, tile.num_elems);
    gradients = converted.values;
  }
  if (residual_ == nullptr) {
    return encode(gradients, wire, tile.num_elems, pass_.contribution_factor, {rank_, number});
  }
  // Error feedback (Seide et al. 2014): the residual is kept in units of the result, which stay
  // the same when the loss scale changes.
  float* residual = residual_ + tile.begin;
  TileFloats wanted, sent;
  for (size_t i = 0; i < tile.num_elems; ++i) {
    wanted.values[i] = gradients[i] * pass_.contribution_factor + residual[i] / pass_.result_factor;
  }
  encode(wanted.values, wire, tile.num_elems, 1, {rank_, number});
  wire_loops_.decode_sum({&wire, 1}, sent.values, tile.num_elems, 1);
  for (size_t i = 0; i < tile.num_elems; ++i) {
    const float lost = (wanted.values[i] - sent.values[i]) * pass_.result_factor;
    residual[i] = std::isfinite(lost) ? lost : 0;
  }
}

}  // namespace rota::cpu
