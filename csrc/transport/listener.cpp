#include "transport/listener.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <sstream>
#include <system_error>

#include "base/error.h"
#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {
namespace {

struct Latest {
  std::mutex mutex;
  std::weak_ptr<Listener> listener;
};

// A sandbox may know accept() alone. Then a program that this process starts at this moment
// inherits the connection, which costs a descriptor.
UniqueFd accept_from(const UniqueFd& socket) {
  const int fd = accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC);
  if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return UniqueFd(fd);
  UniqueFd connection(accept(socket.get(), nullptr, nullptr));
  if (connection.get() >= 0) fcntl(connection.get(), F_SETFD, FD_CLOEXEC);
  return connection;
}

}  // namespace

std::shared_ptr<Listener> Listener::open() {
  Latest& latest = per_process<Latest>();
  const std::lock_guard lock(latest.mutex);
  std::shared_ptr<Listener> listener = latest.listener.lock();
  if (!listener) {
    listener = std::make_shared<Listener>();
    latest.listener = listener;
  }
  return listener;
}

Listener::Listener()
    : name_([] {
        auto name = in_classic_locale<std::ostringstream>();
        name << "rota-" << std::hex << random_number() << random_number();
        return name.str();
      }()),
      socket_(listen_at(name_)),
      life_(per_process<Heap>().words().life) {
  try {
    *thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    fail_transport(join("cannot start the thread that answers peers (", error.what(),
                        "); raise `ulimit -u` or the container's limit of processes"));
  }
}

Listener::~Listener() {
  if (thread_.is_of_parent()) return;
  shutdown(socket_.get(), SHUT_RDWR);
  thread_->join();
}

void Listener::add(uint64_t token, Exposed& exposed) {
  const std::lock_guard lock(mutex_);
  exposed_[token] = &exposed;
}

void Listener::remove(uint64_t token) {
  if (thread_.is_of_parent()) return;  // in a forked child the mutex may stay locked for ever
  const std::lock_guard lock(mutex_);
  exposed_.erase(token);
}

void Listener::serve() {
  const LifeHolder holder(life_);
  while (true) {
    UniqueFd connection = accept_from(socket_);
    if (connection.get() >= 0) {
      answer(connection);
      // Not only closed: a child that was forked meanwhile keeps a copy, and the client would wait.
      if (connection.get() >= 0) shutdown(connection.get(), SHUT_RDWR);
    } else if (errno == EINVAL) {
      return;  // shut down
    } else if (errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors. The peer keeps waiting in the backlog.
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollSliceMs));
    }
  }
}

void Listener::answer(UniqueFd& connection) {
  // A silent client must not block the others for long.
  const timeval patience{.tv_sec = 1, .tv_usec = 0};
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ReceivedHello received = receive_hello(connection);
  if (!received.is_there || received.hello.refusal[0] != '\0') return;
  const std::lock_guard lock(mutex_);
  const auto found = exposed_.find(received.hello.token);
  if (found != exposed_.end()) found->second->answer(connection, received);
}

}  // namespace rota::transport
