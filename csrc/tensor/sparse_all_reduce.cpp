#include "tensor/sparse_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

// Gathers one-dimensional tensors of the given lengths.
std::vector<at::Tensor> gather(const at::Tensor& own, const std::vector<int64_t>& lengths,
                               const std::function<void(Operation&)>& run) {
  std::vector<at::Tensor> outputs;
  for (const int64_t length : lengths) outputs.push_back(at::empty({length}, own.options()));
  Operation operation{.kind = CollectiveKind::kAllGather, .inputs = own, .outputs = outputs};
  run(operation);
  return outputs;
}

}  // namespace

void check_sparse(const at::Tensor& tensor) {
  if (tensor.layout() != at::kSparse || !tensor.is_cpu()) {
    throw Error(ErrorKind::kType,
                join("rota.all_reduce: the tensor's layout is ", tensor.layout(), " on ",
                     tensor.device().str(), ", expected a sparse COO tensor on the CPU"));
  }
  check_memory(tensor._indices(), "all_reduce");
  check_memory(tensor._values(), "all_reduce");
  reducible_dtype(tensor.scalar_type(), "all_reduce");
}

void all_reduce_sparse(const at::Tensor& tensor, int own_rank, int world_size,
                       const std::function<void(Operation&)>& run) {
  const c10::InferenceMode as_caller(tensor.is_inference());  // as in Packed::unpack()
  const at::NoGradGuard no_grad;
  const auto num_ranks = static_cast<size_t>(world_size);
  const at::Tensor own = tensor.coalesce();
  const at::Tensor indices = own.indices();
  const at::Tensor values = own.values();

  // Ranks with different numbers of dimensions differ in this call's length, which is an error.
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.push_back(tensor.sparse_dim());
  shape.push_back(values.size(0));
  const std::vector<int64_t> equal(num_ranks, static_cast<int64_t>(shape.size()));
  const std::vector<at::Tensor> shapes = gather(at::tensor(shape, at::kLong), equal, run);
  std::vector<int64_t> index_lengths, value_lengths;
  int64_t elems_of_one = 1;
  for (int64_t dim = tensor.sparse_dim(); dim < tensor.dim(); ++dim)
    elems_of_one *= tensor.size(dim);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const at::Tensor& other = shapes[rank];
    const at::IntArrayRef of_other(other.const_data_ptr<int64_t>(),
                                   static_cast<size_t>(other.size(0)));
    const auto dim = static_cast<size_t>(tensor.dim());
    const at::IntArrayRef sizes = of_other.slice(0, dim);
    if (sizes != tensor.sizes() || of_other[dim] != tensor.sparse_dim()) {
      throw Error(ErrorKind::kMismatch,
                  join("rota.all_reduce: rank ", own_rank, " has a sparse tensor of ",
                       tensor.sizes(), " with sparse_dim ", tensor.sparse_dim(), ", rank ", rank,
                       " one of ", sizes, " with sparse_dim ", of_other[dim], "; make them equal"));
    }
    const int64_t num_places = of_other.back();
    index_lengths.push_back(tensor.sparse_dim() * num_places);
    value_lengths.push_back(elems_of_one * num_places);
  }

  // Indices are stored by dimension; by place, the ranks' can be put one after the other.
  const std::vector<at::Tensor> all_indices = gather(indices.t().reshape({-1}), index_lengths, run);
  const std::vector<at::Tensor> all_values = gather(values.reshape({-1}), value_lengths, run);
  std::vector<int64_t> value_sizes = values.sizes().vec();
  const at::Tensor places = at::cat(all_indices).reshape({-1, tensor.sparse_dim()}).t();
  value_sizes[0] = places.size(1);
  // coalesce() adds the elements of one place in the order in which they are listed.
  const at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(places, at::cat(all_values).reshape(value_sizes),
                                    tensor.sizes(), tensor.options())
          .coalesce();
  tensor.copy_(sum);
}

}  // namespace rota::tensors
