// Adapts torch's Store to the bootstrap's interface.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/store.h"

namespace rota::tensors {

class TorchStore final : public transport::Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  const c10::intrusive_ptr<::c10d::Store>& store() const { return store_; }
  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }
  void append(const std::string& key, const std::string& text) override {
    store_->append(key, {text.begin(), text.end()});
  }
  std::string get(const std::string& key) override { return store_->get_to_str(key); }

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

}  // namespace rota::tensors
