// What a rank says about the collective it enters. Every rank reads every other's before anything
// is written to an output, so a mismatch is an error on all of them and never a wrong number.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "schedule/select.h"

namespace rota {

enum class CollectiveKind : uint8_t { kAllReduce, kBroadcast, kAllGather, kBarrier };

inline constexpr std::array<std::string_view, 4> kCollectiveNames{"all_reduce", "broadcast",
                                                                  "all_gather", "barrier"};

struct Descriptor {
  CollectiveKind kind;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;
  DType wire = DType::kUInt8;
  DType hop = DType::kUInt8;
  schedule::Algorithm algorithm = schedule::Algorithm::kOneShot;
  int root = 0;
  uint64_t num_elems = 0;

  bool operator==(const Descriptor&) const = default;

  std::string_view kind_name() const { return kCollectiveNames[static_cast<size_t>(kind)]; }
  // "all_reduce(sum, float32[1024], two_shot)"
  std::string to_string() const;

  // As it travels beside a flag. The kind is stored plus one, so that no descriptor is all zero.
  using Words = std::array<uint64_t, 7>;
  Words to_words() const {
    return {(static_cast<uint64_t>(kind) + 1) | static_cast<uint64_t>(op) << 8 |
                static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(wire) << 24 |
                static_cast<uint64_t>(hop) << 32 | static_cast<uint64_t>(algorithm) << 40,
            num_elems, static_cast<uint64_t>(root)};
  }
  static Descriptor from_words(const Words& words);
};

}  // namespace rota
