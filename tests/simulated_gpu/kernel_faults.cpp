#include "kernel_faults.h"

#include <unistd.h>

#include <cstdlib>

namespace simulated_gpu {

bool is_named_by(const char* variable, std::string_view kernel) {
  const char* part = std::getenv(variable);
  return part != nullptr && *part != '\0' && kernel.find(part) != kernel.npos;
}

void hang() {
  while (true) pause();
}

}  // namespace simulated_gpu
