#include "core/descriptor.h"

#include "base/error.h"

namespace rota {
namespace {

// Bounded: the words come from another process.
template <typename Enum>
Enum enum_at(uint64_t word, int shift, size_t num_values) {
  return static_cast<Enum>(((word >> shift) & 0xff) % num_values);
}

}  // namespace

Descriptor Descriptor::from_words(const Words& words) {
  const uint64_t packed = words[0] - 1;
  return {.kind = enum_at<CollectiveKind>(packed, 0, kCollectiveNames.size()),
          .op = enum_at<ReduceOp>(packed, 8, kNumReduceOps),
          .dtype = enum_at<DType>(packed, 16, kNumDTypes),
          .wire = enum_at<DType>(packed, 24, kNumDTypes),
          .hop = enum_at<DType>(packed, 32, kNumDTypes),
          .algorithm = enum_at<schedule::Algorithm>(packed, 40, schedule::kAlgorithmNames.size()),
          .root = static_cast<int>(words[2]),
          .num_elems = words[1]};
}

std::string Descriptor::to_string() const {
  const std::string tensor = join(name(dtype), '[', num_elems, ']');
  switch (kind) {
    case CollectiveKind::kAllReduce: {
      std::string text = join(kind_name(), '(', name(op), ", ", tensor, ", ", name(algorithm));
      if (wire != dtype) text += join(", wire ", name(wire));
      if (hop != info(wire).accumulate) text += join(", hop ", name(hop));
      return text + ')';
    }
    case CollectiveKind::kBroadcast:
      return join(kind_name(), '(', tensor, ", root ", root, ')');
    case CollectiveKind::kAllGather:
      return join(kind_name(), '(', tensor, ')');
    case CollectiveKind::kBarrier:
      return join(kind_name(), "()");
  }
  return "unknown collective";
}

}  // namespace rota
