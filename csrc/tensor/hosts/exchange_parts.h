// Gather, scatter and all-to-all over several hosts: each part goes from its rank to the one that
// it is for, through the host's memory or the network. A rank sends to others at once.
#pragma once

#include "cpu/buffers.h"
#include "schedule/call.h"
#include "tensor/hosts/bridge.h"
#include "tensor/hosts/scratch.h"

namespace rota::tensors {

void exchange_parts(Bridge& bridge, Scratch& scratch, const Call& call,
                    const cpu::Buffers& buffers);

}  // namespace rota::tensors
