// Device memory of other processes. A handle says which descriptor of which process is the file
// that the memory is, which works while that process lives and between processes of one user.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "capture.h"
#include "devices.h"
#include "memory.h"
#include "result.h"
#include "settings.h"

namespace simulated_gpu {
namespace {

struct Handle {
  uint64_t file;  // which tells it from a later one of the same number
  size_t offset;
  size_t num_bytes;
  size_t page_bytes;
  pid_t process;
  int fd;
  int device;  // whatever CUDA_VISIBLE_DEVICES says
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

struct Import {
  void* base;
  int num_opened;
};

// By file; guarded by the runtime's lock.
std::map<uint64_t, Import>& imports() {
  static auto* all = new std::map<uint64_t, Import>;
  return *all;
}

uint64_t file_of(int fd) {
  struct stat status;
  require(fstat(fd, &status) == 0, cudaErrorMapBufferObjectFailed);
  return status.st_ino;
}

void* open_handle(const Handle& handle) {
  require(settings().has_ipc, cudaErrorMapBufferObjectFailed);
  require(handle.process != getpid(), cudaErrorDeviceUninitialized,
          "a process cannot open a handle of its own");
  const std::lock_guard guard(runtime_mutex());
  if (const auto place = imports().find(handle.file); place != imports().end()) {
    ++place->second.num_opened;
    return place->second.base;
  }
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail(cudaErrorMapBufferObjectFailed, path + ": " + std::strerror(errno));
  require(file_of(fd) == handle.file, cudaErrorMapBufferObjectFailed,
          "the memory of this handle has been freed");
  const int visible = visible_device(handle.device);
  const int device = visible < 0 ? current_device() : visible;
  void* base = memory().import(device, fd, handle.page_bytes, handle.offset, handle.num_bytes);
  imports()[handle.file] = {base, 1};
  return base;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  return call([&] {
    const auto allocation = memory().find(address);
    require(allocation && allocation->kind == MemoryKind::kDevice, cudaErrorInvalidValue,
            "only what cudaMalloc gave can be shared");
    const Handle made{.file = file_of(allocation->fd),
                      .offset = static_cast<size_t>(allocation->base - allocation->pages),
                      .num_bytes = allocation->num_bytes,
                      .page_bytes = allocation->page_bytes,
                      .process = getpid(),
                      .fd = allocation->fd,
                      .device = physical_device(allocation->device)};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &made, sizeof(made));
  });
}

// The whole allocation, whichever address in it the handle was made of, as the real one.
extern "C" cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  return call([&] {
    check_device(current_device());
    refuse_while_capturing("cudaIpcOpenMemHandle");
    Handle given;
    std::memcpy(&given, &handle, sizeof(given));
    *address = open_handle(given);
  });
}

extern "C" cudaError_t cudaIpcCloseMemHandle(void* address) {
  return call([&] {
    refuse_while_capturing("cudaIpcCloseMemHandle");
    wait_for_all_devices();
    const std::lock_guard guard(runtime_mutex());
    for (auto& [file, import] : imports()) {
      if (import.base != address) continue;
      if (--import.num_opened == 0) {
        memory().release_import(address);
        imports().erase(file);
      }
      return;
    }
    fail(cudaErrorInvalidValue, "no handle was opened at this address");
  });
}

extern "C" cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return call([] { fail_unsupported("events of several processes"); });
}

extern "C" cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return call([] { fail_unsupported("events of several processes"); });
}
