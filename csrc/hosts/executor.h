// How each collective runs over several hosts: this rank's part, in the calling thread.
#pragma once

#include <optional>

#include "cpu/buffers.h"
#include "hosts/bridge.h"
#include "hosts/reducers.h"
#include "hosts/scratch.h"
#include "schedule/call.h"

namespace rota::hosts {

// Blocks until it is done. The call's wire format is what travels between hosts. Throws Error, as
// Bridge::run().
void execute(Bridge& bridge, Scratch& scratch, const Call& call, const LevelOrders& orders,
             const cpu::Buffers& buffers, std::optional<Nanoseconds> own_timeout);

}  // namespace rota::hosts
