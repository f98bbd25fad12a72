// Gather, scatter and all-to-all over several hosts: each part goes from its rank to the one that
// it is for, through the host's memory or the network. A rank sends to others at once.
#pragma once

#include "cpu/buffers.h"
#include "hosts/bridge.h"
#include "hosts/scratch.h"
#include "schedule/call.h"

namespace rota::hosts {

void exchange_parts(Bridge& bridge, Scratch& scratch, const Call& call,
                    const cpu::Buffers& buffers);

}  // namespace rota::hosts
