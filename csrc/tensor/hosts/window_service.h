// The service of windows over several hosts, over a torch process group.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hosts/window_service.h"
#include "tensor/hosts/torch_connections.h"

namespace rota::tensors {

// backend: of all ranks; rota alone uses it. hosts: each rank's host id. number: of this service
// among those over the backend. Throws PythonError.
std::shared_ptr<hosts::WindowService> make_window_service(BackendPtr backend,
                                                          const std::vector<std::string>& hosts,
                                                          int rank, int number);

}  // namespace rota::tensors
