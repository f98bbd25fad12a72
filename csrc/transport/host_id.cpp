#include "transport/host_id.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "transport/unique_fd.h"

namespace rota::transport {
namespace {

// Empty if the system has none. Any other failure to read it, such as a lack of descriptors,
// throws, because an empty id would look like another host.
std::string boot_id() {
  const UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char id[64];
  const ssize_t size = file.get() < 0 ? -1 : read(file.get(), id, sizeof(id));
  if (size < 0 && errno != ENOENT) {
    throw Error(ErrorKind::kTransport,
                join(with_errno("rota: cannot read this host's boot id", errno),
                     errno == EMFILE ? "; raise `ulimit -n`" : ""));
  }
  const std::string_view text(id, static_cast<size_t>(std::max(size, ssize_t{0})));
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

std::string host_id() {
  if (const char* id = std::getenv("ROTA_HOST_ID")) {
    // It becomes the end of a line (Bootstrap).
    if (std::strchr(id, '\n') == nullptr) return id;
    throw Error(ErrorKind::kTransport,
                join("rota: ROTA_HOST_ID is '", id, "', expected text without a line break"));
  }
  char network[64] = {};
  if (readlink("/proc/self/ns/net", network, sizeof(network) - 1) < 0) network[0] = '\0';
  return join(boot_id(), "/", network);
}

}  // namespace rota::transport
