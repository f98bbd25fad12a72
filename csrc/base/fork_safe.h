// Members that belong to threads, of classes whose objects a forked child may destroy.
#pragma once

#include <utility>

#include "base/fork_generation.h"

namespace rota {

// A T that a forked child does not destroy. The child has a copy of the object, but not of the
// threads that run or wait on it: to destroy a std::condition_variable waits until its waiters have
// left it, which there they never do, and a std::thread that is not joined ends the process.
template <typename T>
class ForkSafe {
 public:
  template <typename... Args>
  explicit ForkSafe(Args&&... args) : value_(std::forward<Args>(args)...) {}
  ~ForkSafe() {
    if (!is_of_parent()) value_.~T();
  }
  ForkSafe(const ForkSafe&) = delete;
  ForkSafe& operator=(const ForkSafe&) = delete;

  // Whether this is the copy of a forked child.
  bool is_of_parent() const { return fork_generation_ != fork_generation(); }
  T& operator*() { return value_; }
  T* operator->() { return &value_; }

 private:
  const uint64_t fork_generation_ = fork_generation();
  union {
    T value_;
  };
};

}  // namespace rota
