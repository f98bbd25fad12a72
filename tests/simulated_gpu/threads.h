// Threads of the simulation.
#pragma once

#include <csignal>
#include <functional>
#include <thread>

namespace simulated_gpu {

// Signals such as Ctrl-C stay with the program's own threads.
inline std::thread start_thread(std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace simulated_gpu
