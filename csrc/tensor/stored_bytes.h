// Tensors and the bytes in which they are stored: as they are, with a checksum, or in a wire
// format. All tensors are contiguous and on the CPU. Errors are Error(kValue).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/wire_format.h"

namespace rota::tensors {

// cpu/checksum.h, of the tensor's bytes.
uint64_t checksum(const at::Tensor& tensor);
// dst and src have equally many bytes. Returns the checksum of what was copied.
uint64_t copy_with_checksum(const at::Tensor& dst, const at::Tensor& src);

// The bytes that num_elems elements take.
int64_t encoded_bytes(int64_t num_elems, const WireFormat& wire);
// bytes: uint8, encoded_bytes(); values: float32. Rounds once, to nearest.
void encode(const at::Tensor& bytes, const at::Tensor& values, const WireFormat& wire);
void decode(const at::Tensor& values, const at::Tensor& bytes, const WireFormat& wire);

}  // namespace rota::tensors
