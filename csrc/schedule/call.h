// The one description of a collective, which every layer below the tensors uses, on the CPU and on
// GPUs. core/plan.h creates it. Ranks compare its words, so a mismatch is an error on all ranks,
// never a wrong number. On the CPU each rank reads every other's before anything is written to an
// output.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/wire_format.h"
#include "schedule/collective.h"
#include "schedule/select.h"
#include "schedule/sum_order.h"

namespace rota {

// What an all-reduce does to a gradient bucket besides summing it.
struct BucketPass {
  float contribution_factor = 1;            // multiplies each rank's gradients, before rounding
  float divisor = 1;                        // divides the sum, in every all-reduce that averages
  float result_factor = 1;                  // multiplies the result, after rounding
  bool has_residual = false;                // error feedback
  std::optional<uint64_t> stochastic_seed;  // none: round to nearest

  bool operator==(const BucketPass&) const = default;
};

struct Call {
  CollectiveKind kind;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;  // of the tensor
  // What contributions and results are rounded to; where there is no arithmetic, kUInt8: bytes.
  WireFormat wire{DType::kUInt8};
  DType hop = DType::kUInt8;  // the dtype of partial sums in rings
  schedule::Algorithm algorithm = schedule::Algorithm::kOneShot;
  int root = 0;  // of those that have one
  schedule::SumOrder order;
  int node_size = 0;       // of two_level: ranks of a NUMA node
  uint64_t num_elems = 0;  // of the rank's tensor, or of each rank's part; 0 for all_to_all, whose
                           // ranks compare the parts of each pair (cpu/all_to_all.h)
  uint64_t uneven = 0;  // a hash of the parts' lengths if they differ, then num_elems is their sum
  BucketPass pass;
  bool is_between_gpus = false;  // over several hosts: by their GPUs and a device engine, which
                                 // ranks whose tensors are on the CPU would leave waiting
  bool is_withdrawn = false;  // its rank has found that it cannot run it, and lets the others know

  bool operator==(const Call&) const = default;

  std::string_view kind_name() const { return name(kind); }
  // An all_gather that encodes parts instead of copying them.
  bool encodes_parts() const {
    return kind == CollectiveKind::kAllGather && wire.dtype != DType::kUInt8;
  }
  uint64_t num_bytes() const { return num_elems * info(dtype).num_bytes; }
  // "all_reduce(sum, float32[1024], two_shot)"
  std::string to_string() const;

  // The encoding that travels as a flag's payload. The kind is stored plus one, so no call is all
  // zeros.
  using Words = std::array<uint64_t, 7>;
  Words to_words() const {
    return {(static_cast<uint64_t>(kind) + 1) | static_cast<uint64_t>(op) << 8 |
                static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(wire.dtype) << 32 |
                static_cast<uint64_t>(hop) << 40 | static_cast<uint64_t>(algorithm) << 48 |
                static_cast<uint64_t>(wire.is_block_scaled) << 56 |
                static_cast<uint64_t>(pass.stochastic_seed.has_value()) << 57 |
                static_cast<uint64_t>(is_withdrawn) << 58,
            num_elems,
            static_cast<uint16_t>(root) | static_cast<uint64_t>(order.group_size) << 16 |
                static_cast<uint64_t>(order.num_shards) << 32,
            bits_of(pass.contribution_factor) | bits_of(pass.divisor) << 32,
            bits_of(pass.result_factor) | static_cast<uint64_t>(pass.has_residual) << 32 |
                static_cast<uint64_t>(node_size) << 40 |
                static_cast<uint64_t>(is_between_gpus) << 56,
            pass.stochastic_seed.value_or(0),
            uneven};
  }
  static Call from_words(const Words& words);
  // A hash of the words: different calls collide with probability 2^-64.
  static uint64_t fingerprint(const Words& words);

 private:
  static uint64_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
};

}  // namespace rota
