// What a launch leaves that gives up: NaN where it would have stored results. The stream goes on
// before the host can know, and nobody may take what is there for sums.
#pragma once

#include "cuda/collective_args.h"
#include "schedule/chunk.h"

namespace rota::cuda {

// A byte of which every float, wire format and scale (base/wire_format.h) is NaN or makes one.
inline constexpr std::byte kNanByte{0xff};

template <typename Block>
HOST_DEVICE void fill_with_nan(const Block& block, std::byte* begin, size_t num_bytes) {
  const auto stride = static_cast<size_t>(block.num_threads());
  for (auto i = static_cast<size_t>(block.thread()); i < num_bytes; i += stride) {
    begin[i] = kNanByte;
  }
}

// The chunks of this block alone: other blocks and ranks may have come to their end, with results
// that are right. All threads of the block call it, after a barrier.
//
// It is not inlined, and the compiler does not know which arguments these are. Otherwise it would
// keep what the sums and this have in common in registers, of which the sums leave none.
template <typename Block>
HOST_DEVICE __attribute__((noinline)) void spoil_results(const Block& block, int rank,
                                                         const CollectiveArgs& kernel_args) {
  const CollectiveArgs* unknown = &kernel_args;
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(unknown));
#endif
  const CollectiveArgs& args = *unknown;
  if (args.output_floats == OutputFloats::kNone || rank == args.source) return;
  const uint64_t num_elems =
      args.output_floats == OutputFloats::kOneShard ? args.shard_elems : args.num_elems;
  const WirePlace output = args.format.place(args.output[block.local_rank()], num_elems);
  const auto num_shards = static_cast<int>(schedule::ceil_div(num_elems, args.shard_elems));
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks()) {
    for (int shard = 0; shard < num_shards; ++shard) {
      const schedule::Range chunk =
          schedule::chunk_of_shard(num_elems, args.shard_elems, shard, args.chunk_elems, i);
      const WirePlace place = args.format.from(output, chunk.begin);
      fill_with_nan(block, place.payload, args.format.payload_bytes(chunk.num_elems));
      fill_with_nan(block, place.scales, args.format.num_scales(chunk.num_elems));
    }
  }
}

}  // namespace rota::cuda
