// What this thread is doing for which communicators.
//
// Python may run inside a wait, on the stack of the call that waits: signal handlers, and
// finalizers of what the wait releases. A collective holds locks there, and its turn among the
// calls, so another one of the same communicator would wait for itself: it is refused at once.
#pragma once

#include <string_view>

#include "base/error.h"

namespace rota {

class CallScope {
 public:
  enum class Kind {
    kCollective,  // holds its communicator's turn
    kWait,        // for a message, or for calls that have their own thread; holds nothing
  };

  // communicator: only its address is used. Throws Error(kInternal) for a collective that is called
  // inside another one.
  CallScope(const void* communicator, std::string_view call, Kind kind = Kind::kCollective)
      : innermost_of_thread_(innermost_),
        outer_(innermost_of_thread_),
        communicator_(communicator),
        call_(call),
        kind_(kind) {
    if (outer_ != nullptr && kind == Kind::kCollective) check_not_inside(communicator, call);
    innermost_of_thread_ = this;
  }
  ~CallScope() { innermost_of_thread_ = outer_; }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  std::string_view call() const { return call_; }

  // The innermost one of that communicator; null: this thread is outside of its calls.
  static const CallScope* find(const void* communicator) {
    const CallScope* scope = innermost_;
    while (scope != nullptr && scope->communicator_ != communicator) scope = scope->outer_;
    return scope;
  }
  // Whether this thread is inside a call of any communicator.
  static bool is_in_any() { return innermost_ != nullptr; }

  // Throws Error(kInternal) inside a collective of that communicator.
  static void check_not_inside(const void* communicator, std::string_view call) {
    for (const CallScope* scope = innermost_; scope != nullptr; scope = scope->outer_) {
      if (scope->communicator_ != communicator || scope->kind_ != Kind::kCollective) continue;
      throw Error(ErrorKind::kInternal,
                  join("rota.", call, ": called inside rota.", scope->call_,
                       " of the same communicator (from a signal handler?); set a flag in the "
                       "handler and call it after the collective"));
    }
  }

 private:
  static inline constinit thread_local const CallScope* innermost_ = nullptr;

  const CallScope*& innermost_of_thread_;  // looked up once, since that takes a call
  const CallScope* outer_;
  const void* communicator_;
  std::string_view call_;
  Kind kind_;
};

}  // namespace rota
