#include "ranks.h"

#include <sched.h>
#include <unistd.h>

#include <thread>

#include "transport/thread_transport.h"

namespace rota::test {

void dawdle(Random& random) {
  const uint64_t chance = random.below(16);
  if (chance == 0) {
    usleep(random.below(300));
  } else if (chance < 4) {
    sched_yield();
  }
}

void run_threads(int num_threads, const std::function<void(int)>& body) {
  FirstException first_exception;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        first_exception.keep();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  first_exception.rethrow();
}

void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
               const RanksOptions& options) {
  auto transports = transport::ThreadTransport::make_world(world_size, options.geometry);
  FirstException first_exception;
  run_threads(world_size, [&](int rank) {
    Communicator communicator(std::move(transports[static_cast<size_t>(rank)]), options.timeout,
                              options.check_interrupt);
    try {
      body(communicator);
    } catch (const std::exception& exception) {
      first_exception.keep();
      communicator.abort(exception.what());  // or the others would wait for this rank
    }
  });
  first_exception.rethrow();
}

}  // namespace rota::test
