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
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  // The key must exist.
  virtual std::string get(const std::string& key) = 0;
};

}  // namespace rota::transport
