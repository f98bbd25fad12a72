// The element work of a sum over several hosts: what a host sums, what hosts send each other, and
// what the tensor gets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "hosts/reducers.h"
#include "schedule/call.h"
#include "schedule/chunk.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/host_gpus.h"

namespace rota::tensors {

// Rounded up to whole tiles.
inline uint64_t in_tiles(uint64_t num_elems) {
  return schedule::ceil_div(num_elems, kTileElems) * kTileElems;
}

// Whether the kernels give a sum the bits of hosts/hierarchical_sum.cpp; the same on all ranks.
// call: what ranks compare.
bool sums_on_gpus(const Call& call, const schedule::Hosts& hosts);

class LevelSums {
 public:
  // type: of the tensor. The arguments outlive this.
  LevelSums(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
            at::ScalarType type);

  at::Tensor partials(uint64_t num_elems) const { return gpus_.empty(num_elems, type_); }
  size_t partial_bytes() const { return info(accumulate_).num_bytes; }
  // Whether a rank's elements are what its host sums.
  bool is_plain() const { return accumulate_ == call_.dtype && factor_ == 1; }
  // Whether a host's sums are what other hosts get.
  bool sends_partials() const {
    return call_.wire == WireFormat{accumulate_} && !call_.pass.has_residual;
  }
  // Whether the sums of all hosts are what the tensor gets.
  bool is_direct() const;
  ReduceOp partial_op() const;
  OrderOptions local_order() const { return {.is_tree = orders_.local.num_shards != 0}; }

  // In the wire format.
  size_t message_bytes(uint64_t num_elems) const;

  // A rank's elements, as its host sums them.
  void contribute(const void* data, uint64_t num_elems, const at::Tensor& partials) const;

  // A host's sums, as other hosts get them.
  void encode(const void* partials, uint64_t num_elems, std::byte* message,
              float* residual = nullptr) const;

  // Every message becomes the sum of the hosts', rounded once.
  void sum(const at::Tensor& messages, const RankOfEachHost& senders, uint64_t num_elems) const;

  // The sums of all hosts to the tensor. memory: of as many tiles. wire: where they lie. stats:
  // null for none.
  void decode(const BucketMemory& memory, std::byte* wire, void* data, uint64_t num_elems,
              double* stats = nullptr) const;

 private:
  HostGpus& gpus_;
  const Call& call_;
  const hosts::LevelOrders& orders_;
  DType accumulate_;
  at::ScalarType type_;  // of partial sums
  float factor_;
  float result_factor_;
};

}  // namespace rota::tensors
