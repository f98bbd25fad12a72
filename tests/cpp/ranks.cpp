#include "ranks.h"

#include <mutex>
#include <thread>

#include "transport/thread_transport.h"

namespace rota::test {

void run_threads(int num_threads, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr first_exception;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first_exception) first_exception = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_exception) std::rethrow_exception(first_exception);
}

void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
               const RanksOptions& options) {
  auto transports = transport::ThreadTransport::make_world(world_size, options.geometry);
  std::mutex mutex;
  std::exception_ptr first_exception;
  run_threads(world_size, [&](int rank) {
    Communicator communicator(std::move(transports[static_cast<size_t>(rank)]), options.timeout,
                              options.check_interrupt);
    try {
      body(communicator);
    } catch (const std::exception& exception) {
      {
        const std::lock_guard lock(mutex);
        if (!first_exception) first_exception = std::current_exception();
      }
      communicator.abort(exception.what());  // or the others would wait for this rank
    }
  });
  if (first_exception) std::rethrow_exception(first_exception);
}

}  // namespace rota::test
