// What peers read of a process, in the first page of its heap (transport/heap.h).
#pragma once

#include "base/core_sharing.h"
#include "transport/life.h"

namespace rota::transport {

struct ProcessWords {
  Life life;
  CoreWord core;
};

}  // namespace rota::transport
