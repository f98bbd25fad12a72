// What launches refuse, before anything is launched: each function throws Error(kValue), which
// states what was given and what is expected. launch_plan.cpp plans what has passed.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "cuda/launch_plan.h"

namespace rota::cuda {

template <typename... Parts>
[[noreturn]] void refuse_launch(const Parts&... parts) {
  throw Error(ErrorKind::kValue, join("rota: ", parts...));
}

// The ranks that are summed as a group, in groups.
int group_size_of(const LaunchRequest& request, const Peers& peers);
bool has_equal_shards(Kernel kernel);
bool has_source(Kernel kernel);

// Everything but the tensors.
void check_launch(const LaunchRequest& request, const Peers& peers);
// The tensors, if they have elements.
void check_tensors(const LaunchRequest& request, const Peers& peers);
void check_adds_in_tree(Kernel kernel);
// capacity: the most elements that a message takes.
void check_capacity(const LaunchRequest& request, const transport::DeviceGeometry& geometry,
                    uint64_t capacity, uint64_t granule_elems);

}  // namespace rota::cuda
