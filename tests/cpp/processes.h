// Ranks as separate processes: forked children, and a Store in a directory that they share.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "transport/store.h"
#include "transport/transport.h"
#include "transport/unique_fd.h"

namespace rota::test {

// How a child ended.
struct Exit {
  int code = 0;
  int signal = 0;

  bool operator==(const Exit&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Exit& exit);

// Runs body in a forked child, which is killed if this process ends first. Its exit code is 0 when
// body returns, and 1 after a message when it throws or leaks.
pid_t start_process(const std::function<void()>& body);
Exit wait_for_process(pid_t pid);

// One child for each rank; fails unless all of them exit with 0.
void run_processes(int world_size, const std::function<void(int)>& body);

// A directory that its creator's process removes; children only use it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  pid_t owner_;
};

// Keeps each key in a file.
class FileStore final : public transport::Store {
 public:
  explicit FileStore(const TemporaryDirectory& directory) : directory_(directory.path()) {}
  int64_t add(const std::string& key, int64_t amount) override;
  void append(const std::string& key, const std::string& text) override;
  std::string get(const std::string& key) override;

  void set(const std::string& key, const std::string& value);
  bool has(const std::string& key);

  // get() that waits until the key appears.
  std::string await(const std::string& key);

 private:
  transport::UniqueFd lock() const;
  std::filesystem::path path_of(const std::string& key) const;

  std::filesystem::path directory_;
};

// Connects a SharedMemoryRank, with defaults for what most tests do not vary.
std::unique_ptr<transport::Transport> connect(
    const TemporaryDirectory& directory, int rank, int world_size,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace rota::test
