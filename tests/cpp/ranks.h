// Ranks as threads of this process, over transport::ThreadTransport.
#pragma once

#include <functional>

#include "core/communicator.h"

namespace rota::test {

// So small that a few KiB already pass through many slots.
inline constexpr transport::Geometry kSmall{
    .message_bytes = 1024, .slot_bytes = 4096, .link_slot_bytes = 256};

// Longer than any wait that goes well, also where a sanitizer and other people share the cores.
inline constexpr std::chrono::seconds kPatience{60};

struct RanksOptions {
  transport::Geometry geometry = kSmall;
  Nanoseconds timeout = kPatience;
  std::function<void()> check_interrupt = [] {};
};

// Runs body on every rank, each in a thread with a communicator of its own, which it closes when it
// is done, whoever else still works. A rank that throws aborts the group; the first such exception
// is thrown again here.
void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
               const RanksOptions& options = {});

// The same for ranks that share a transport but build what they need themselves.
void run_threads(int num_threads, const std::function<void(int)>& body);

}  // namespace rota::test
