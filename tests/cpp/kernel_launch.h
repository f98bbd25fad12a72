// One launch of a kernel body on threads of the host, picked by what is known at run time only. As
// the launches on a GPU, but for what host_block.h stands for.
#pragma once

#include <array>

#include "base/wire_format.h"
#include "cuda/codec.h"
#include "cuda/collective_args.h"
#include "cuda/peers.h"
#include "host_block.h"

namespace rota::test {

enum class Kernel : uint8_t {
  kOneShot,
  kTwoShot,
  kTwoShotInPlace,
  kRing,
  kOrderedRing,
  kHierarchical,
  kLowLatency,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kSend,
};
inline constexpr std::array kKernelNames{
    "one_shot",     "two_shot",    "two_shot_in_place", "ring",       "ordered_ring",
    "hierarchical", "low_latency", "reduce_scatter",    "all_gather", "broadcast",
    "send"};

enum class Role : uint8_t { kNone, kSender, kReceiver };

struct KernelLaunch {
  Kernel kernel;
  WireFormat format;
  cuda::CollectiveArgs args;
  cuda::MappedTensors tensors;  // of two_shot_in_place
  Role role = Role::kNone;      // in kSend
};

// On one thread of one rank.
void launch(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

// The same in parts, which take the compiler a while each.
void launch_direct(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_ring(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_groups(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_other(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

// body.template operator()<Codec>() for a wire format.
template <typename Body>
void with_codec(const WireFormat& format, const Body& body) {
  using cuda::Codec;
  switch (format.dtype) {
    case DType::kFloat32:
      return body.template operator()<Codec<DType::kFloat32>>();
    case DType::kFloat64:
      return body.template operator()<Codec<DType::kFloat64>>();
    case DType::kFloat16:
      return format.is_block_scaled ? body.template operator()<Codec<DType::kFloat16, true>>()
                                    : body.template operator()<Codec<DType::kFloat16>>();
    case DType::kBFloat16:
      return body.template operator()<Codec<DType::kBFloat16>>();
    case DType::kFloat8E4M3:
      return format.is_block_scaled ? body.template operator()<Codec<DType::kFloat8E4M3, true>>()
                                    : body.template operator()<Codec<DType::kFloat8E4M3>>();
    case DType::kFloat8E5M2:
      return format.is_block_scaled ? body.template operator()<Codec<DType::kFloat8E5M2, true>>()
                                    : body.template operator()<Codec<DType::kFloat8E5M2>>();
    case DType::kUInt8:
      return body.template operator()<Codec<DType::kUInt8>>();
    case DType::kInt8:
      return body.template operator()<Codec<DType::kInt8>>();
    case DType::kInt16:
      return body.template operator()<Codec<DType::kInt16>>();
    case DType::kInt32:
      return body.template operator()<Codec<DType::kInt32>>();
    case DType::kInt64:
      return body.template operator()<Codec<DType::kInt64>>();
    case DType::kBool:
      return body.template operator()<Codec<DType::kBool>>();
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return;  // never reduced; moved as bytes
  }
}

}  // namespace rota::test
