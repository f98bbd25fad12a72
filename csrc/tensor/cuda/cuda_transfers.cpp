// Send and recv of CUDA tensors, and the collectives that consist of transfers between pairs of
// ranks.
#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include "schedule/direct.h"
#include "tensor/cuda/cuda_collectives.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/packed_operation.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {

bool CudaCollectives::is_of_transfers(const Call& call) {
  return call.kind == CollectiveKind::kGather || call.kind == CollectiveKind::kScatter ||
         call.kind == CollectiveKind::kAllToAll ||
         (call.kind == CollectiveKind::kAllGather && call.uneven != 0);
}

// Receives run beside sends, because a send may wait for the peer to receive; both are queued step
// by step (schedule/direct.h).
void CudaCollectives::run_transfers(const Operation& operation, const Call& call) {
  communicator_->post_launch(call);  // a mismatch is better found here than by a pair of ranks
  const CollectiveRow& row = row_of(call.kind);
  const int rank = communicator_->rank();
  const int world_size = communicator_->world_size();
  const PackedOperation packed(operation, rank, world_size);
  const cpu::Buffers buffers = packed.buffers();
  const bool contributes = is_among(row.contributors, rank, call.root);
  const bool receives = is_among(row.receivers, rank, call.root);
  const auto input_for = [&](int peer) { return buffers.inputs[row.is_input_per_rank ? peer : 0]; };
  const auto output_from = [&](int peer) {
    return buffers.outputs[row.is_output_per_rank ? peer : 0];
  };
  const auto transfer = [&](const cpu::Part& part, int source, int destination) {
    const Call one{.kind = call.kind, .dtype = call.dtype, .num_elems = part.num_elems};
    run_transfer(one, part.data, source, destination);
  };

  const c10::Stream sending = guard_.getStream(device_);
  put_behind(sending, receive_stream_);
  // Also if a transfer throws: the memory is free again for what `sending` does next.
  auto join = c10::make_scope_exit([&] {
    try {
      put_behind(receive_stream_, sending);
    } catch (const c10::Error&) {
      // The driver is gone, and with it all that ran.
    }
  });
  for (int step = 0; step < world_size - 1; ++step) {
    const int source = schedule::source_at(rank, world_size, step);
    if (receives && is_among(row.contributors, source, call.root)) {
      const c10::StreamGuard on_stream(receive_stream_);
      transfer(output_from(source), source, rank);
    }
    const int destination = schedule::rotated_peer(rank, world_size, step);
    if (contributes && is_among(row.receivers, destination, call.root)) {
      transfer(input_for(destination), rank, destination);
    }
  }
  if (contributes && receives) {
    const cpu::Part from = input_for(rank), to = output_from(rank);
    if (from.data != to.data) {
      cuda::launch_copy(to.data, from.data, from.num_elems * info(call.dtype).num_bytes,
                        current_stream(device_));
    }
  }
  join.release();
  put_behind(receive_stream_, sending);
  packed.unpack();
}

WorkRef CudaCollectives::transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t,
                                  Launch mode) {
  const int rank = communicator_->rank();
  const bool is_send = direction == Direction::kSend;
  check_tensor(tensor, "send_recv", device_);
  if (peer < 0 || peer >= communicator_->world_size() || peer == rank) {
    throw Error(ErrorKind::kValue,
                join("rota.", name(direction), ": the other rank is ", peer,
                     ", expected one in [0, ", communicator_->world_size(), ") other than ", rank,
                     peer == rank ? "; copy a CUDA tensor to send it to oneself" : ""));
  }
  const Call call{.kind = CollectiveKind::kSendRecv,
                  .dtype = movable_dtype(tensor, "send_recv"),
                  .num_elems = num_elems(tensor)};
  const auto body = [&] {
    const Packed packed(tensor, is_send ? Packed::Content::kRead : Packed::Content::kOverwritten);
    run_transfer(call, packed.data(), is_send ? rank : peer, is_send ? peer : rank);
    if (!is_send) packed.unpack();
  };
  return launch(mode, is_send ? stream_ : receive_stream_, op_type_of(direction),
                title_of(direction), tensor, body);
}

void CudaCollectives::run_transfer(const Call& call, void* data, int source, int destination) {
  run({.kernel = cuda::Kernel::kTransfer,
       .input = {data},
       .output = {data},
       .num_elems = call.num_bytes(),
       .format = cuda::kBytes,
       .moves_floats = has_nan(call.dtype),
       .source = source,
       .destination = destination,
       .fingerprint = communicator_->post_transfer(call, source, destination)});
}

}  // namespace rota::tensors
