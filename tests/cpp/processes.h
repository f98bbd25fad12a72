// Ranks as separate processes: forked children, and a Store in a directory that they share.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "core/communicator.h"
#include "transport/store.h"
#include "transport/transport.h"
#include "transport/unique_fd.h"

namespace rota::test {

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
// Both; fails unless the child exits with 0.
void check_child(const std::function<void()>& body);

// From now on a signal comes every millisecond, as from a profiler's timer.
void raise_alarms();

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

class FileStore final : public transport::Store {
 public:
  explicit FileStore(const TemporaryDirectory& directory) : directory_(directory.path()) {}
  int64_t add(const std::string& key, int64_t amount) override;
  void append(const std::string& key, const std::string& text) override;
  std::string get(const std::string& key) override;

  void set(const std::string& key, const std::string& value = "1");
  // get() that waits until the key appears.
  std::string await(const std::string& key);

 private:
  transport::UniqueFd lock() const;
  std::filesystem::path path_of(const std::string& key) const;

  std::filesystem::path directory_;
};

// One child for each rank, with a store that they share; fails unless all of them exit with 0.
void run_processes(int world_size, const std::function<void(int, FileStore&)>& body);

std::unique_ptr<transport::Transport> connect(FileStore& store, int rank, int world_size);
Communicator make_communicator(FileStore& store, int rank, int world_size);

}  // namespace rota::test
