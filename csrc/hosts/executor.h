// How each collective runs over several hosts: this rank's part, in the calling thread.
#pragma once

#include "hosts/reducers.h"

namespace rota::hosts {

// Blocks until it is done. The call's wire format is what travels between hosts. Throws Error, as
// Bridge::run().
void execute(const Task& task);

}  // namespace rota::hosts
