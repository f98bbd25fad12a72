// Another backend, which runs what rota has no kernels for on CUDA tensors. Made when first needed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>

namespace rota::c10d_backend {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;

class Delegate {
 public:
  // Makes a backend of these ranks, and warns once that it runs `collective`. May throw.
  using Make = std::function<BackendPtr(const std::string& collective, const StorePtr& store,
                                        int rank, int world_size)>;

  Delegate(Make make, StorePtr store, int rank, int world_size)
      : make_(std::move(make)), store_(std::move(store)), rank_(rank), world_size_(world_size) {}

  ::c10d::Backend& backend_for(std::string_view collective) {
    if (!backend_) backend_ = make_(std::string(collective), store_, rank_, world_size_);
    return *backend_;
  }
  // Null until it is needed.
  const BackendPtr& backend() const { return backend_; }
  const Make& make() const { return make_; }

 private:
  Make make_;
  StorePtr store_;
  int rank_;
  int world_size_;
  BackendPtr backend_;
};

}  // namespace rota::c10d_backend
