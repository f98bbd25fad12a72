#include "hosts/joint_setup.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace rota::hosts {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStorePollMs = 2;  // as Bootstrap's
// After the timeout of a step, in which a rank may have waited for others; and after a failure,
// for ranks that would not find the store of a process that ends.
constexpr std::chrono::milliseconds kGrace{2000};

// Errors are joined to a text that has the prefix.
std::string without_prefix(std::string text) {
  constexpr std::string_view kPrefix = "rota: ";
  return text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : text;
}

}  // namespace

// A line of the store: rank, kind, and the rest of the line.
struct JointSetup::Outcome {
  int rank = 0;
  ErrorKind error = ErrorKind::kNone;
  std::string text;  // the settings, or what has failed

  std::string to_line() const {
    std::string line = join(rank, ' ', static_cast<uint64_t>(error), ' ', text);
    std::ranges::replace(line, '\n', ' ');
    return line + '\n';
  }
  static Outcome from_line(const std::string& line) {
    auto parts = in_classic_locale<std::istringstream>(line);
    Outcome outcome;
    uint64_t error = 0;
    parts >> outcome.rank >> error;
    parts.get();
    outcome.error = static_cast<ErrorKind>(error);
    std::getline(parts, outcome.text);
    return outcome;
  }
};

JointSetup::JointSetup(transport::Store& store, const schedule::Hosts& hosts, int rank,
                       std::chrono::milliseconds timeout, std::function<void()> check_interrupt,
                       std::function<std::string(int rank)> why_ended)
    : store_(store),
      hosts_(hosts),
      rank_(rank),
      timeout_(timeout),
      check_interrupt_(std::move(check_interrupt)),
      why_ended_(std::move(why_ended)) {}

void JointSetup::step(const std::function<std::string()>& body) {
  const auto deadline = Clock::now() + timeout_ + kGrace;
  ++num_steps_;
  Outcome own{.rank = rank_};
  try {
    own.text = body();
  } catch (const Error& error) {
    own.error = error.kind();
    own.text = without_prefix(error.what());
  } catch (const std::exception& error) {
    publish({rank_, ErrorKind::kPeerFailed, join("was interrupted: ", error.what())});
    throw;
  }
  publish(own);
  wait_for_all(deadline);
}

void JointSetup::publish(const Outcome& outcome) {
  store_.append(join("step/", num_steps_), outcome.to_line());
}

// The first failure in the store is the cause of later ones.
void JointSetup::wait_for_all(Clock::time_point deadline) {
  std::vector<std::optional<Outcome>> outcomes(static_cast<size_t>(hosts_.world_size()));
  std::vector<std::string> ends(outcomes.size());  // of ranks, from before the text was read
  std::optional<Outcome> failure;
  while (true) {
    std::istringstream text(store_.get(join("step/", num_steps_)));
    for (std::string line; std::getline(text, line);) {
      const Outcome outcome = Outcome::from_line(line);
      outcomes.at(static_cast<size_t>(outcome.rank)) = outcome;
      if (failure || outcome.error == ErrorKind::kNone) continue;
      failure = outcome;
      deadline = std::min(deadline, Clock::now() + kGrace);
    }
    const bool are_all_there =
        std::ranges::all_of(outcomes, [](const auto& outcome) { return outcome.has_value(); });
    if (are_all_there || Clock::now() > deadline) break;
    check_interrupt_();
    for (size_t rank = 0; why_ended_ && rank < outcomes.size(); ++rank) {
      if (outcomes[rank] || static_cast<int>(rank) == rank_) continue;
      if (!ends[rank].empty()) fail(ErrorKind::kPeerFailed, ends[rank]);
      // It may have taken the step, done its part of a call and ended since the text was read.
      ends[rank] = why_ended_(static_cast<int>(rank));
    }
    poll(nullptr, 0, kStorePollMs);
  }
  const auto name = [&](size_t rank) { return hosts_.describe(static_cast<int>(rank)); };
  if (failure) {
    fail(failure->error, join(name(static_cast<size_t>(failure->rank)), ": ", failure->text));
  }
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank]) {
      fail(ErrorKind::kTransport,
           join(name(rank), " has not connected to the other hosts within ", timeout_.count(),
                " ms; has its process ended, or is the network between the hosts down?"));
    }
    if (outcomes[rank]->text == outcomes[0]->text) continue;
    fail(ErrorKind::kMismatch,
         join("ranks disagree: ", name(0), " has ", outcomes[0]->text, "; ", name(rank), " has ",
              outcomes[rank]->text, "; give every rank the same"));
  }
}

void JointSetup::fail(ErrorKind kind, const std::string& what) const {
  throw Error(kind, join("rota: ", what, " (rank ", rank_, " of ", hosts_.world_size(),
                         " ranks sees ", hosts_.to_string(), ")"));
}

}  // namespace rota::hosts
