// Which host a process is on.
#pragma once

#include <string>

namespace rota::transport {

// Equal for processes that can share memory: the kernel's boot id and the network namespace of the
// sockets. ROTA_HOST_ID overrides it.
std::string host_id();

}  // namespace rota::transport
