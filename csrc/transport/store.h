// The key-value store interface that bootstrap needs; tensor/torch_store.h adapts torch's Store.
#pragma once

#include <cstdint>
#include <string>

namespace rota::transport {

class Store {
 public:
  virtual ~Store() = default;
  // Adds to the number under key, 0 at first, and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Appends to the text under key, empty at first. Need not wait for the store's answer.
  virtual void append(const std::string& key, const std::string& text) = 0;
  // The key must exist.
  virtual std::string get(const std::string& key) = 0;
};

}  // namespace rota::transport
