#include "tensor/tensor_collectives.h"

#include "base/error.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

void check_companion(const at::Tensor& tensor, std::string_view what, at::ScalarType dtype,
                     int64_t num_elems, at::Device device) {
  check_tensor(tensor, "reduce_bucket", device);
  if (tensor.scalar_type() == dtype && tensor.numel() == num_elems && tensor.is_contiguous()) {
    return;
  }
  throw Error(ErrorKind::kValue,
              join("rota.reduce_bucket: ", what, " has ", tensor.numel(), " elements of ",
                   c10::toString(tensor.scalar_type()),
                   tensor.is_contiguous() ? "" : " and is not contiguous", ", expected ", num_elems,
                   " contiguous ones of ", c10::toString(dtype)));
}

std::optional<DType> optional_dtype(const std::optional<at::ScalarType>& dtype,
                                    std::string_view what) {
  if (!dtype) return std::nullopt;
  return reducible_dtype(*dtype, what);
}

}  // namespace

void check_bucket(const at::Tensor& bucket, const BucketOptions& options) {
  const at::Device device = bucket.device();
  check_tensor(bucket, "reduce_bucket", device);
  check_companion(options.stats, "stats", at::kDouble, 2, device);
  if (options.residual) {
    check_companion(*options.residual, "residual", at::kFloat, bucket.numel(), device);
  }
}

void check_gather(const AllGatherTensors& gather, int world_size) {
  const at::Device device = gather.input.device();
  check_tensor(gather.input, "all_gather", device);
  movable_dtype(gather.input, "all_gather");
  if (gather.outputs.size() != static_cast<size_t>(world_size)) {
    throw Error(ErrorKind::kValue, join("rota.all_gather: ", gather.outputs.size(),
                                        " output tensors, expected world_size = ", world_size));
  }
  for (const at::Tensor& output : gather.outputs) {
    check_tensor(output, "all_gather", device);
    if (output.numel() != gather.input.numel() ||
        output.scalar_type() != gather.input.scalar_type()) {
      throw Error(ErrorKind::kValue,
                  join("rota.all_gather: an output has ", output.numel(), " elements of ",
                       output.dtype().name(), ", the input has ", gather.input.numel(), " of ",
                       gather.input.dtype().name(), "; make them equal"));
    }
  }
}

AllReduceRequest request_of(const at::Tensor& tensor, const AllReduceOptions& options) {
  return {.num_elems = static_cast<uint64_t>(tensor.numel()),
          .dtype = reducible_dtype(tensor.scalar_type(), "the tensor's dtype"),
          .op = options.op,
          .algorithm = options.algorithm,
          .wire = optional_dtype(options.wire_dtype, "wire_dtype"),
          .hop = optional_dtype(options.hop_dtype, "hop_dtype")};
}

BucketRequest request_of(const at::Tensor& bucket, const BucketOptions& options) {
  return {.num_elems = static_cast<uint64_t>(bucket.numel()),
          .dtype = known_dtype(bucket.scalar_type(), "reduce_bucket", "the bucket's dtype",
                               is_bucket_dtype),
          .wire = {known_dtype(options.wire_dtype, "reduce_bucket", "wire_dtype", is_wire_dtype),
                   options.block_scaling},
          .algorithm = options.algorithm};
}

void run_all_reduce(Communicator& communicator, const at::Tensor& tensor, cpu::AllReduceArgs args,
                    CallerThread thread) {
  const Packed packed(tensor, Packed::Content::kRead);
  args.data = packed.data();
  communicator.all_reduce(args, thread);
  packed.unpack();
}

void run_reduce_bucket(Communicator& communicator, const at::Tensor& bucket,
                       const BucketOptions& options, cpu::AllReduceArgs args, CallerThread thread) {
  const Packed packed(bucket, Packed::Content::kRead);
  cpu::BucketPass pass = options.pass;
  if (options.residual) pass.residual = options.residual->data_ptr<float>();
  cpu::BucketMeasures measures(args.num_elems);
  args.data = packed.data();
  args.pass = &pass;
  args.measures = &measures;
  communicator.all_reduce(args, thread);
  packed.unpack();
  auto* stats = options.stats.data_ptr<double>();
  stats[0] = static_cast<double>(measures.num_non_finite);
  stats[1] = measures.sum_of_squares();
}

void run_broadcast(Communicator& communicator, const at::Tensor& tensor, int root,
                   CallerThread thread) {
  const bool is_root = root == communicator.rank();
  const Packed packed(tensor, is_root ? Packed::Content::kRead : Packed::Content::kOverwritten);
  communicator.broadcast({packed.data(), num_bytes(tensor), root},
                         movable_dtype(tensor, "broadcast"), thread);
  if (!is_root) packed.unpack();
}

void run_all_gather(Communicator& communicator, const AllGatherTensors& gather,
                    CallerThread thread) {
  const Packed input(gather.input, Packed::Content::kRead);
  std::vector<Packed> outputs;
  std::vector<void*> pointers;
  for (const at::Tensor& tensor : gather.outputs) {
    pointers.push_back(outputs.emplace_back(tensor, Packed::Content::kOverwritten).data());
  }
  communicator.all_gather({input.data(), pointers.data(), num_bytes(gather.input)},
                          movable_dtype(gather.input, "all_gather"), thread);
  for (const Packed& output : outputs) output.unpack();
}

}  // namespace rota::tensors
