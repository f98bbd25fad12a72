#include "faults.h"

#include <pthread.h>

#include <csignal>
#include <cstdio>

#include "memory.h"

namespace simulated_gpu {
namespace {

struct sigaction previous_segv, previous_bus;

// Not safe in a handler by the letter, but the process is at its end.
void handle(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  if (const auto allocation = memory().find_fenced(address)) {
    char thread[16] = "";
    pthread_getname_np(pthread_self(), thread, sizeof(thread));
    std::fprintf(stderr,
                 "simulated GPU: access to byte %td of an allocation of %zu bytes%s, by a thread "
                 "named %s (kernels' threads have their names)\n",
                 address - allocation->base, allocation->num_bytes,
                 signal == SIGBUS ? " that its process has freed" : "", thread);
  }
  // The access is tried again, and meets the handler from before.
  sigaction(signal, signal == SIGBUS ? &previous_bus : &previous_segv, nullptr);
}

}  // namespace

void report_faults() {
  struct sigaction action{};
  action.sa_sigaction = &handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

}  // namespace simulated_gpu
