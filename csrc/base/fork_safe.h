// For members tied to threads, in classes whose objects a forked child may destroy.
#pragma once

#include <utility>

#include "base/fork_generation.h"

namespace rota {

// A T that a forked child does not destroy. The child has a copy of the object but not the threads
// that use it: destroying a std::condition_variable blocks until its waiters leave, which never
// happens in the child, and destroying a joinable std::thread terminates the process.
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

  // Whether this is a forked child's copy.
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
