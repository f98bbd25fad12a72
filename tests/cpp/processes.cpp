#include "processes.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <vector>

#include "base/per_process.h"
#include "check.h"
#include "ranks.h"
#include "transport/heap.h"
#include "transport/shared_memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace rota::test {
namespace {

int run_child(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    std::cerr << "pid " << getpid() << ": " << error.what() << '\n';
    return 1;
  }
#if defined(__SANITIZE_ADDRESS__)
  return __lsan_do_recoverable_leak_check() == 0 ? 0 : 1;
#else
  return 0;
#endif
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Exit& exit) {
  return out << "{code " << exit.code << ", signal " << exit.signal << '}';
}

pid_t start_process(const std::function<void()>& body) {
  const pid_t parent = getpid();
  const pid_t pid = fork();
  check(pid >= 0, "fork");
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  _exit(run_child([&] {
    per_process<transport::Heap>();  // opens its descriptor before tests count theirs
    body();
  }));
}

Exit wait_for_process(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) check(errno == EINTR, "waitpid");
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
          .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

void raise_alarms() {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  check(sigaction(SIGALRM, &action, nullptr) == 0, "sigaction");
  const itimerval every_ms{.it_interval = {0, 1000}, .it_value = {0, 1000}};
  check(setitimer(ITIMER_REAL, &every_ms, nullptr) == 0, "setitimer");
}

TemporaryDirectory::TemporaryDirectory() : owner_(getpid()) {
  std::string name = std::filesystem::temp_directory_path() / "rota-test-XXXXXX";
  check(mkdtemp(name.data()) != nullptr, "mkdtemp");
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  if (owner_ == getpid()) std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path FileStore::path_of(const std::string& key) const {
  std::string name = key;
  for (char& letter : name) {
    if (letter == '/') letter = '-';
  }
  return directory_ / name;
}

transport::UniqueFd FileStore::lock() const {
  transport::UniqueFd lock(open((directory_ / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  check(flock(lock.get(), LOCK_EX) == 0, "flock");
  return lock;
}

int64_t FileStore::add(const std::string& key, int64_t amount) {
  const transport::UniqueFd locked = lock();
  int64_t sum = 0;
  std::ifstream(path_of(key)) >> sum;
  sum += amount;
  std::ofstream(path_of(key)) << sum;
  return sum;
}

void FileStore::append(const std::string& key, const std::string& text) {
  const transport::UniqueFd locked = lock();
  set(key, get(key) + text);
}

void FileStore::set(const std::string& key, const std::string& value) {
  const std::filesystem::path complete = path_of(key);
  std::filesystem::path partial = complete;
  partial += join(".", getpid());
  std::ofstream(partial) << value;
  std::filesystem::rename(partial, complete);
}

std::string FileStore::get(const std::string& key) {
  std::ifstream file(path_of(key));
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string FileStore::await(const std::string& key) {
  test::await([&] { return std::filesystem::exists(path_of(key)); }, join("to be set: ", key));
  return get(key);
}

void check_child(const std::function<void()>& body) {
  check_equal(wait_for_process(start_process(body)), Exit{}, "end of the child");
}

void run_processes(int world_size, const std::function<void(int, FileStore&)>& body) {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world_size; ++rank) {
    pids.push_back(start_process([&] {
      FileStore store(directory);
      body(rank, store);
    }));
  }
  std::vector<Exit> exits;
  for (const pid_t pid : pids) exits.push_back(wait_for_process(pid));
  for (size_t rank = 0; rank < exits.size(); ++rank) {
    check_equal(exits[rank], Exit{}, join("end of rank ", rank));
  }
}

std::unique_ptr<transport::Transport> connect(FileStore& store, int rank, int world_size) {
  return transport::SharedMemoryRank(store, rank, world_size, kSmall).connect(kPatience, [] {});
}

Communicator make_communicator(FileStore& store, int rank, int world_size) {
  return {connect(store, rank, world_size), kPatience, [] {}};
}

}  // namespace rota::test
