#include "tensor/stored_bytes.h"

#include "base/error.h"
#include "cpu/checksum.h"
#include "cpu/element_loops.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

void check_contiguous(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    check_memory(tensor, "checksum");
    if (tensor.is_contiguous()) return;
  }
  throw Error(ErrorKind::kValue, "rota: a tensor is strided or not on the CPU, expected neither");
}

void check_lengths(size_t got, size_t expected) {
  if (got == expected) return;
  throw Error(ErrorKind::kValue, join("rota: ", got, " bytes, expected ", expected));
}

void check_encoded(const at::Tensor& bytes, const at::Tensor& values, const WireFormat& wire) {
  check_contiguous(bytes);
  check_contiguous(values);
  if (values.scalar_type() != at::kFloat) {
    throw Error(ErrorKind::kValue, join("rota: the values are ",
                                        c10::toString(values.scalar_type()), ", expected float32"));
  }
  check_lengths(bytes.nbytes(), wire.num_bytes(static_cast<uint64_t>(values.numel())));
}

WirePlace place_of(const at::Tensor& bytes, const at::Tensor& values, const WireFormat& wire) {
  return wire.place(static_cast<std::byte*>(bytes.data_ptr()),
                    static_cast<uint64_t>(values.numel()));
}

}  // namespace

uint64_t checksum(const at::Tensor& tensor) {
  check_contiguous(tensor);
  return cpu::checksum(tensor.data_ptr(), tensor.nbytes());
}

uint64_t copy_with_checksum(const at::Tensor& dst, const at::Tensor& src) {
  check_contiguous(dst);
  check_contiguous(src);
  check_lengths(dst.nbytes(), src.nbytes());
  return cpu::copy_with_checksum(dst.data_ptr(), src.data_ptr(), src.nbytes());
}

int64_t encoded_bytes(int64_t num_elems, const WireFormat& wire) {
  return static_cast<int64_t>(wire.num_bytes(static_cast<uint64_t>(num_elems)));
}

void encode(const at::Tensor& bytes, const at::Tensor& values, const WireFormat& wire) {
  check_encoded(bytes, values, wire);
  cpu::element_loops().wire(wire).encode(static_cast<const float*>(values.data_ptr()),
                                         place_of(bytes, values, wire),
                                         static_cast<size_t>(values.numel()), 1);
}

void decode(const at::Tensor& values, const at::Tensor& bytes, const WireFormat& wire) {
  check_encoded(bytes, values, wire);
  const WirePlace place = place_of(bytes, values, wire);
  cpu::element_loops().wire(wire).decode_sum({.srcs = &place, .num = 1},
                                             static_cast<float*>(values.data_ptr()),
                                             static_cast<size_t>(values.numel()), 1);
}

}  // namespace rota::tensors
