// The element work of sums over hosts: cpu::Reducer, or cpu::BucketReducer for gradient buckets and
// for scaled blocks.
#pragma once

#include <type_traits>

#include "cpu/bucket_reducer.h"
#include "cpu/reducer.h"

namespace rota::tensors {

template <typename R>
inline constexpr bool kIsBucketReducer = std::is_same_v<R, cpu::BucketReducer>;

template <typename R>
R make_reducer(const Call& call, const cpu::Buffers& buffers, int rank, int num_contributors) {
  if constexpr (kIsBucketReducer<R>) {
    return R(call, buffers, rank, num_contributors);
  } else {
    return R(call, buffers.data, /*writes_sums=*/false, num_contributors);
  }
}

// A sum in scaled blocks of a tensor that is no gradient bucket.
inline Call as_bucket(const Call& call) {
  Call bucket = call;
  bucket.kind = CollectiveKind::kReduceBucket;
  bucket.pass = {.divisor = call.op == ReduceOp::kAvg ? call.pass.divisor : 1};
  return bucket;
}

}  // namespace rota::tensors
