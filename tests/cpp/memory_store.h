// The store of ranks that are threads.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "transport/store.h"

namespace rota::test {

class MemoryStore final : public transport::Store {
 public:
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return numbers_[key] += amount;
  }
  void append(const std::string& key, const std::string& text) override {
    const std::lock_guard lock(mutex_);
    texts_[key] += text;
  }
  std::string get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return texts_.at(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::string, std::string> texts_;
};

}  // namespace rota::test
