// What a rank says about the collective it enters. Every rank reads every other's before anything
// is written to an output, so a mismatch is an error on all of them and never a wrong number.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/wire_format.h"
#include "schedule/select.h"

namespace rota {

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kReduceBucket,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kSendRecv,
  kBarrier,
};

inline constexpr std::array<std::string_view, 7> kCollectiveNames{
    "all_reduce",     "reduce_bucket", "broadcast", "all_gather",
    "reduce_scatter", "send_recv",     "barrier"};

struct Descriptor {
  CollectiveKind kind;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;
  WireFormat wire{DType::kUInt8};
  DType hop = DType::kUInt8;
  schedule::Algorithm algorithm = schedule::Algorithm::kOneShot;
  int root = 0;
  uint64_t num_elems = 0;
  // Of reduce_bucket.
  float contribution_factor = 0;
  float divisor = 0;
  float result_factor = 0;
  bool has_residual = false;
  std::optional<uint64_t> stochastic_seed;

  bool operator==(const Descriptor&) const = default;

  std::string_view kind_name() const { return kCollectiveNames[static_cast<size_t>(kind)]; }
  // "all_reduce(sum, float32[1024], two_shot)"
  std::string to_string() const;

  // As it travels beside a flag. The kind is stored plus one, so that no descriptor is all zero.
  using Words = std::array<uint64_t, 7>;
  Words to_words() const {
    return {(static_cast<uint64_t>(kind) + 1) | static_cast<uint64_t>(op) << 8 |
                static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(wire.dtype) << 24 |
                static_cast<uint64_t>(hop) << 32 | static_cast<uint64_t>(algorithm) << 40 |
                static_cast<uint64_t>(wire.is_block_scaled) << 48 |
                static_cast<uint64_t>(stochastic_seed.has_value()) << 56,
            num_elems,
            static_cast<uint64_t>(root),
            bits_of(contribution_factor) | bits_of(divisor) << 32,
            bits_of(result_factor) | static_cast<uint64_t>(has_residual) << 32,
            stochastic_seed.value_or(0)};
  }
  static Descriptor from_words(const Words& words);
  // The same in one word, which differs where descriptors differ, but for one in 2^64.
  static uint64_t fingerprint(const Words& words);

 private:
  static uint64_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
};

}  // namespace rota
