#include "schedule/call.h"

#include <charconv>

#include "base/error.h"
#include "base/random_bits.h"

namespace rota {
namespace {

// Reduced to a valid value, because the words come from another process.
template <typename Enum>
Enum enum_at(uint64_t word, int shift, size_t num_values) {
  return static_cast<Enum>(((word >> shift) & 0xff) % num_values);
}

DType dtype_at(uint64_t word, int shift) {
  const auto dtype = static_cast<DType>(word >> shift);
  return is_moved_dtype(dtype) ? dtype : enum_at<DType>(word, shift, kNumDTypes);
}

float float_at(uint64_t word, int shift) {
  return std::bit_cast<float>(static_cast<uint32_t>(word >> shift));
}

// The shortest text that parses to the same number, so different factors never look alike.
std::string text_of(float value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end);
}

std::string wire_text(const WireFormat& wire) {
  return join(", wire ", name(wire.dtype), wire.is_block_scaled ? " in scaled blocks" : "");
}

}  // namespace

Call Call::from_words(const Words& words) {
  const uint64_t packed = words[0] - 1;
  return {.kind = enum_at<CollectiveKind>(packed, 0, kCollectives.size()),
          .op = enum_at<ReduceOp>(packed, 8, kNumReduceOps),
          .dtype = dtype_at(packed, 16),
          .wire = {enum_at<DType>(packed, 32, kNumDTypes), enum_at<bool>(packed, 56, 2)},
          .hop = enum_at<DType>(packed, 40, kNumDTypes),
          .algorithm = enum_at<schedule::Algorithm>(packed, 48, schedule::kAlgorithmNames.size()),
          .root = static_cast<uint16_t>(words[2]),
          .order = {.group_size = static_cast<uint16_t>(words[2] >> 16),
                    .num_shards = static_cast<uint32_t>(words[2] >> 32)},
          .node_size = static_cast<uint16_t>(words[4] >> 40),
          .num_elems = words[1],
          .uneven = words[6],
          .pass = {.contribution_factor = float_at(words[3], 0),
                   .divisor = float_at(words[3], 32),
                   .result_factor = float_at(words[4], 0),
                   .has_residual = enum_at<bool>(words[4], 32, 2),
                   .stochastic_seed =
                       enum_at<bool>(packed, 57, 2) ? std::optional(words[5]) : std::nullopt},
          .is_between_gpus = enum_at<bool>(words[4], 56, 2),
          .is_withdrawn = enum_at<bool>(packed, 58, 2)};
}

uint64_t Call::fingerprint(const Words& words) {
  uint64_t fingerprint = 0;
  for (const uint64_t word : words) fingerprint = mix(fingerprint ^ word);
  return fingerprint;
}

std::string Call::to_string() const {
  const CollectiveRow& row = row_of(kind);
  if (kind == CollectiveKind::kBarrier) {
    return is_between_gpus ? "connect_device()" : join(row.name(), "()");
  }
  std::string text = join(row.name(), '(');
  const bool is_bucket =
      kind == CollectiveKind::kReduceBucket || kind == CollectiveKind::kReduceShards;
  if (row.reduces && !is_bucket) text += join(name(op), ", ");
  text += std::string(name(dtype));
  if (kind != CollectiveKind::kAllToAll) text += join('[', num_elems, ']');
  if (kind == CollectiveKind::kUpdateShards) {
    text += join(", options and pieces ", uneven);
  } else if (uneven != 0) {
    text += join(" in unequal parts ", uneven);
  }
  if (row.has_root()) text += join(", root ", root);
  if (kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceBucket) {
    text += join(", ", name(algorithm));
  }
  if (node_size != 0) text += join(", nodes of ", node_size);
  if (is_bucket) {
    text += join(wire_text(wire), ", ", text_of(pass.contribution_factor), " * sum / ",
                 text_of(pass.divisor), " * ", text_of(pass.result_factor));
    if (pass.has_residual) text += ", residual";
    if (pass.stochastic_seed) text += join(", stochastic_seed ", *pass.stochastic_seed);
  } else if (encodes_parts()) {
    text += wire_text(wire);
  } else if (row.reduces) {
    if (wire.dtype != dtype) text += wire_text(wire);
    if (hop != info(wire.dtype).accumulate) text += join(", hop ", name(hop));
  }
  if (order.group_size != 0) text += join(", groups of ", order.group_size);
  if (order.num_shards != 0) text += join(", tree of ", order.num_shards, " shards");
  if (is_between_gpus) text += ", between GPUs";
  text += ')';
  if (is_withdrawn)
    text += " and withdrew it, because a tensor was resized or freed before it began";
  return text;
}

}  // namespace rota
