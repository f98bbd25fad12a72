#include "base/cores.h"

#include <sched.h>

namespace rota {

int num_usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

}  // namespace rota
