// The backend's options, as torch's pg_options.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>

#include "base/dtype.h"
#include "tensor/tensor_communicator.h"

namespace rota::c10d_backend {

struct BackendOptions final : ::c10d::Backend::Options {
  BackendOptions(std::chrono::milliseconds timeout, size_t slot_bytes,
                 std::optional<at::ScalarType> wire_dtype, const OrderOptions& order,
                 std::optional<WireFormat> inter_wire)
      : Options("rota", timeout),
        slot_bytes(slot_bytes),
        wire_dtype(wire_dtype),
        order(order),
        inter_wire(inter_wire) {}

  size_t slot_bytes;
  // What all_reduce rounds wider floats to, once on the way in and once on the way out; none: it
  // does not round.
  std::optional<at::ScalarType> wire_dtype;
  OrderOptions order;                    // of all_reduce, reduce and reduce_scatter
  std::optional<WireFormat> inter_wire;  // as in TensorCommunicatorOptions, as choose_engine
  tensors::ChooseEngine choose_engine;
  // Runs when a coalescing block begins, with what is to be called once torch's manager of the
  // block is gone, however it has ended. Null: only endCoalescing() ends blocks.
  std::function<void(std::function<void()> leave)> watch_block;
  // As in TensorCommunicatorOptions.
  bool connects_at_first_use = false;
  std::function<void()> check_interrupt;
  std::function<void()> check_peers;
  std::function<std::string(int rank)> why_ended;

  // torch calls it from 2.15 on, which has it as a virtual method; older ones do not.
  c10::intrusive_ptr<Options> clone() const { return c10::make_intrusive<BackendOptions>(*this); }

  tensors::TensorCommunicatorOptions of_communicator() const {
    return {.timeout = timeout,
            .slot_bytes = slot_bytes,
            .connects_at_first_use = connects_at_first_use,
            .check_interrupt = check_interrupt,
            .check_peers = check_peers,
            .why_ended = why_ended,
            .choose_engine = choose_engine,
            .inter_wire = inter_wire};
  }
};

}  // namespace rota::c10d_backend
