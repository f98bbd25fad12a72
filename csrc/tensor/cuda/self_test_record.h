// The self-test's results on disk, so that a GPU is tested once for each driver and build: a text
// file for each GPU in ROTA_CACHE_DIR, $XDG_CACHE_HOME/rota or ~/.cache/rota.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/device_info.h"

namespace rota::tensors {

// The findings; none if there is no record of this GPU with this driver and this build, or it
// cannot be read.
std::optional<std::vector<std::string>> read_self_test_record(const cuda::GpuInfo& gpu);

// Writes the whole record or nothing. If it cannot be written, the next process tests again.
void write_self_test_record(const cuda::GpuInfo& gpu,
                            const std::vector<std::string>& findings) noexcept;

}  // namespace rota::tensors
