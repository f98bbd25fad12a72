// The steps in which ranks connect to other hosts. All ranks take each step together: what fails on
// one of them is an error on every rank, with its cause and the hosts as the rank sees them, and
// nobody waits for a rank that has given up.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "base/error.h"
#include "schedule/hosts.h"
#include "transport/store.h"

namespace rota::hosts {

class JointSetup {
 public:
  // store: of this group alone. Both references must outlive this. why_ended: as in Bootstrap.
  JointSetup(transport::Store& store, const schedule::Hosts& hosts, int rank,
             std::chrono::milliseconds timeout, std::function<void()> check_interrupt,
             std::function<std::string(int rank)> why_ended = {});

  // Runs body() and waits until every rank has. body returns the settings that ranks must have in
  // common. Throws what Error another rank's body has thrown first, Error(kMismatch) if settings
  // differ, Error(kPeerFailed) if a rank has ended, and Error(kTransport) if one does not come.
  // Cannot be repeated after an error.
  void step(const std::function<std::string()>& body);

 private:
  struct Outcome;

  void publish(const Outcome& outcome);
  void wait_for_all(std::chrono::steady_clock::time_point deadline);
  [[noreturn]] void fail(ErrorKind kind, const std::string& what) const;

  transport::Store& store_;
  const schedule::Hosts& hosts_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> check_interrupt_;
  const std::function<std::string(int rank)> why_ended_;
  int num_steps_ = 0;
};

}  // namespace rota::hosts
