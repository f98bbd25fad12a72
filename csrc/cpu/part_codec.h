// Elements of a rank's part between its tensor and a wire format, for collectives that encode parts
// instead of copying them. Ranges start at a tile of the part.
#pragma once

#include "cpu/bucket_reducer.h"
#include "cpu/reducer.h"
#include "schedule/call.h"

namespace rota::cpu {

// Calls body(reducer) with the one that rounds as the call does. float64 reaches a scaled block by
// way of float32, and any other wire format in one rounding.
template <typename Body>
void with_reducer_of_part(const Call& call, const Part& part, const Body& body) {
  if (call.wire.is_block_scaled) {
    body(BucketReducer(call, {.data = part.data}, /*rank=*/0, /*world_size=*/1));
  } else {
    body(Reducer(call, part.data, /*writes_sums=*/false, /*world_size=*/1));
  }
}

inline void encode_part(const Call& call, const Part& part, const schedule::Range& range,
                        std::byte* to) {
  with_reducer_of_part(call, part, [&](const auto& reducer) {
    reducer.pack(range, call.wire.place(to, range.num_elems));
  });
}

inline void decode_part(const Call& call, std::byte* from, const Part& part,
                        const schedule::Range& range) {
  with_reducer_of_part(call, part, [&](const auto& reducer) {
    reducer.unpack(call.wire.place(from, range.num_elems), range);
  });
}

}  // namespace rota::cpu
