#include "core/window_watch.h"

#include <iostream>

#include "base/error.h"
#include "core/point_to_point.h"

namespace rota {
namespace {

class WordWatch final : public WindowWatch {
 public:
  WordWatch(const transport::OpenedWindow& window, Nanoseconds timeout, const std::string& who,
            const std::function<void()>& check_interrupt)
      : WindowWatch(timeout, check_interrupt), window_(window), who_(who) {}

 private:
  bool is_anyone_left() const override {
    return is_open(*window_.view().control, window_.process());
  }
  std::vector<const LifeWord*> lives() const override { return {window_.process().life()}; }
  std::string prefix() const override { return "rota"; }
  std::string awaited() const override {
    return join(who_, " (pid ", window_.process().pid(), ')');
  }

  const transport::OpenedWindow& window_;
  const std::string& who_;
};

}  // namespace

std::optional<Error> WindowWatch::tick(Nanoseconds waited) {
  const auto now = Clock::now();
  if (now >= next_interrupt_check_) {
    next_interrupt_check_ = now + kInterruptCheckEvery;
    check_interrupt_();
  }
  PointToPoint::move_all_groups();
  if (!is_anyone_left()) {
    return Error(ErrorKind::kPeerFailed,
                 join(prefix(), " waits in vain for ", awaited(), ": ", end_of_awaited()));
  }
  if (waited >= timeout_) {
    return Error(ErrorKind::kTimeout, join(prefix(), " waited ", milliseconds(waited), " ms for ",
                                           awaited(), "; is it alive?"));
  }
  if (waited >= kStallAfter && !has_warned_) {
    has_warned_ = true;
    std::cerr << join(prefix(), " has waited ", milliseconds(waited), " ms for ", awaited(),
                      "; still waiting\n");
  }
  return std::nullopt;
}

bool is_open(const transport::WindowControl& control, const transport::PeerProcess& process) {
  return control.closed.load() == 0 && process.is_running();
}

void publish_word(const transport::WindowView& view, uint64_t word, uint64_t value) {
  Flag& flag = view.control->word(word);
  flag.publish(value);
  Waiter::wake_all(flag);
}

bool wait_word(const transport::OpenedWindow& window, uint64_t word, uint64_t value,
               Nanoseconds timeout, const std::string& who,
               const std::function<void()>& check_interrupt) {
  WordWatch watch(window, timeout, who, check_interrupt);
  Flag sleeping{};
  Waiter waiter(&sleeping, {});
  const Awaited awaited{&window.view().control->word(word), value};
  return waiter.wait_any({&awaited, 1}, WaitPolicy{}, watch, timeout);
}

}  // namespace rota
