// The self-test's results on disk, so that a GPU is tested once for each driver and build: a text
// file for each GPU in ROTA_CACHE_DIR, $XDG_CACHE_HOME/rota or ~/.cache/rota.
#pragma once

#include <optional>

#include "cuda/device_info.h"
#include "tensor/cuda/unusable_kernels.h"

namespace rota::tensors {

// None if there is no record of this GPU with this driver and this build, or it cannot be read.
std::optional<UnusableKernels> read_self_test_record(const cuda::GpuInfo& gpu);

// Writes the whole record or nothing. If it cannot be written, the next process tests again.
void write_self_test_record(const cuda::GpuInfo& gpu, const UnusableKernels& unusable) noexcept;

}  // namespace rota::tensors
