// The backend's options, as torch's pg_options.
#pragma once

#include "base/timeout.h"
#include "tensor/tensor_communicator.h"

namespace rota::c10d_backend {

struct BackendOptions final : ::c10d::Backend::Options, tensors::TensorCommunicatorOptions {
  BackendOptions(std::chrono::milliseconds timeout, TensorCommunicatorOptions of_communicator,
                 std::optional<at::ScalarType> wire_dtype, const OrderOptions& order)
      : Options("rota", timeout),
        TensorCommunicatorOptions(std::move(of_communicator)),
        wire_dtype(wire_dtype),
        order(order) {}

  // What all_reduce rounds wider floats to, once on the way in and once on the way out; none: it
  // does not round.
  std::optional<at::ScalarType> wire_dtype;
  OrderOptions order;  // of all_reduce, reduce and reduce_scatter
  // Runs when a coalescing block begins, with what is to be called once torch's manager of the
  // block is gone, however it has ended. Null: only endCoalescing() ends blocks.
  std::function<void(std::function<void()> leave)> watch_block;

  // torch calls it from 2.15 on, which has it as a virtual method; older ones do not.
  c10::intrusive_ptr<Options> clone() const { return c10::make_intrusive<BackendOptions>(*this); }
};

// Of a call of c10d; none: the group's.
inline tensors::OwnTimeout own_timeout(std::chrono::milliseconds timeout) {
  if (timeout == ::c10d::kUnsetTimeout) return std::nullopt;
  return usable_timeout(timeout);
}

}  // namespace rota::c10d_backend
