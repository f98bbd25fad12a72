#include "transport/endpoint.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/fork_safe.h"
#include "base/per_process.h"
#include "transport/heap.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older than that
#endif

namespace rota::transport {
namespace {

constexpr uint64_t kHelloMagic = 0x0138'6174'6f72ULL;  // "rota8", changed with the layout
constexpr int kPollSliceMs = 50;                       // the longest delay until Ctrl-C is noticed

struct Hello {
  uint64_t magic;
  uint64_t token;     // of the endpoint that the client connects to
  uint64_t rank;      // of the sender
  char refusal[232];  // in a reply: why the client was refused; empty if it was not
};

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorKind::kTransport, join("rota: ", what));
}

uint64_t random_number() {
  uint64_t number;
  if (getrandom(&number, sizeof(number), 0) != static_cast<ssize_t>(sizeof(number))) {
    fail(with_errno("getrandom", errno));
  }
  return number;
}

// An abstract name (leading zero byte): no file, so nothing to clean up after a kill.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.size() >= sizeof(address.sun_path)) fail("a rank's address is damaged");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd open_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail(with_errno("socket", errno) + "; raise `ulimit -n`");
  return fd;
}

UniqueFd listen_at(const std::string& name) {
  UniqueFd listener = open_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fail(with_errno("bind", errno));
  }
  if (listen(listener.get(), SOMAXCONN) != 0) fail(with_errno("listen", errno));
  return listener;
}

// Each Hello carries two descriptors: the sender's memory for the group and its process's heap.
constexpr size_t kNumDescriptors = 2;

// The buffers of one message, sent or received: a Hello and its descriptors.
struct HelloMessage {
  explicit HelloMessage(Hello& hello) : part{&hello, sizeof(hello)} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }

  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(kNumDescriptors * sizeof(int))] = {};
  msghdr header = {};
};

// Sends no descriptors if there is no memory, which must then be the reason for a refusal.
bool send_hello(const UniqueFd& connection, Hello hello, const UniqueFd& memory,
                const UniqueFd& heap) {
  HelloMessage message(hello);
  if (memory.get() < 0) {
    message.header.msg_controllen = 0;
    return sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) == sizeof(hello);
  }
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  const int descriptors[kNumDescriptors] = {memory.get(), heap.get()};
  control->cmsg_len = CMSG_LEN(sizeof(descriptors));
  std::memcpy(CMSG_DATA(control), descriptors, sizeof(descriptors));
  return sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) == sizeof(hello);
}

// Takes ownership of all descriptors that came with a message, so that none stays open.
std::vector<UniqueFd> take_descriptors(msghdr& header) {
  std::vector<UniqueFd> descriptors;
  cmsghdr* control = CMSG_FIRSTHDR(&header);
  if (control == nullptr || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
    return descriptors;
  }
  for (size_t offset = 0; CMSG_LEN(offset + sizeof(int)) <= control->cmsg_len;
       offset += sizeof(int)) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(control) + offset, sizeof(fd));
    descriptors.emplace_back(fd);
  }
  return descriptors;
}

struct ReceivedHello {
  bool is_there = false;  // false: the peer hung up or sent something else
  Hello hello{};
  UniqueFd memory;  // this and heap are -1 if this process is out of descriptors
  UniqueFd heap;
};

ReceivedHello receive_hello(const UniqueFd& connection) {
  ReceivedHello received;
  HelloMessage message(received.hello);
  ssize_t num_received;
  do {
    num_received = recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC);
  } while (num_received < 0 && errno == EINTR);
  if (num_received < 0) return received;
  received.hello.refusal[sizeof(received.hello.refusal) - 1] = '\0';
  std::vector<UniqueFd> descriptors = take_descriptors(message.header);
  const bool is_cut = (message.header.msg_flags & MSG_CTRUNC) != 0;
  const bool has_all = descriptors.size() == kNumDescriptors && !is_cut;
  const bool has_no_room = descriptors.size() < kNumDescriptors && is_cut;
  const bool is_refusal = descriptors.empty() && received.hello.refusal[0] != '\0';
  received.is_there = num_received == sizeof(Hello) && received.hello.magic == kHelloMagic &&
                      (has_all || has_no_room || is_refusal);
  if (has_all) {
    received.memory = std::move(descriptors[0]);
    received.heap = std::move(descriptors[1]);
  }
  return received;
}

// The process at the other end of a connection, whichever side called connect().
pid_t pid_of_own_user(const UniqueFd& connection) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  // Any user may connect to an abstract address; only this user's processes are trusted.
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
      credentials.uid != geteuid()) {
    fail("a stranger's connection");
  }
  return credentials.pid;
}

std::shared_ptr<PeerProcess> process_of(const UniqueFd& connection) {
  const pid_t pid = pid_of_own_user(connection);
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) != 0) {
    fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  }
  if (fd < 0) {
    fail(join(with_errno("pidfd_open", errno), " for pid ", pid,
              "; rota needs Linux 5.3 and ranks in one PID namespace to notice a peer's death"));
  }
  return per_process<Host>().find_process(pid, UniqueFd(fd));
}

}  // namespace

class Listener {
 public:
  // Returns the process's listener, starting one if none is running.
  static std::shared_ptr<Listener> open();

  Listener();
  ~Listener();

  const std::string& name() const { return name_; }
  std::mutex& mutex() { return mutex_; }
  void add(Endpoint& rank);
  void remove(const Endpoint& rank);

 private:
  struct Latest {
    std::mutex mutex;
    std::weak_ptr<Listener> listener;
  };

  void serve();
  void answer(const UniqueFd& connection);

  const std::string name_;
  UniqueFd socket_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Endpoint*> ranks_;  // by token; guarded by the mutex
  ForkSafe<std::thread> thread_;
};

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
        std::ostringstream name;
        name << "rota-" << std::hex << random_number() << random_number();
        return name.str();
      }()),
      socket_(listen_at(name_)) {
  try {
    *thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    fail(join("cannot start the thread that answers peers (", error.what(),
              "); raise `ulimit -u` or the container's limit of processes"));
  }
}

Listener::~Listener() {
  if (thread_.is_of_parent()) return;
  shutdown(socket_.get(), SHUT_RDWR);
  thread_->join();
}

void Listener::add(Endpoint& rank) {
  const std::lock_guard lock(mutex_);
  ranks_[rank.token_] = &rank;
}

void Listener::remove(const Endpoint& rank) {
  if (thread_.is_of_parent()) return;  // in a forked child the mutex may stay locked for ever
  const std::lock_guard lock(mutex_);
  ranks_.erase(rank.token_);
}

void Listener::serve() {
  while (true) {
    const UniqueFd connection(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() >= 0) {
      answer(connection);
    } else if (errno == EINVAL) {
      return;  // shut down
    } else if (errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors. The peer keeps waiting in the backlog.
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollSliceMs));
    }
  }
}

void Listener::answer(const UniqueFd& connection) {
  // A silent client must not block the others for long.
  const timeval patience{.tv_sec = 1, .tv_usec = 0};
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  const ReceivedHello received = receive_hello(connection);
  if (!received.is_there || received.hello.refusal[0] != '\0') return;
  const std::lock_guard lock(mutex_);
  const auto found = ranks_.find(received.hello.token);
  if (found == ranks_.end()) return;
  Endpoint& rank = *found->second;
  if (received.hello.rank >= rank.peers_.size()) return;
  const auto peer = static_cast<int>(received.hello.rank);
  if (peer == rank.rank_) return;
  Hello own{kHelloMagic, rank.token_, static_cast<uint64_t>(rank.rank_), {}};
  try {
    rank.make_memory_once();
    std::optional<Peer>& place = rank.peers_[static_cast<size_t>(peer)];
    // Otherwise both sides have connected at once.
    if (!place) {
      place.emplace(rank.map(peer, process_of(connection), received.memory, received.heap));
    }
  } catch (const Error& error) {
    std::strncpy(own.refusal, error.what(), sizeof(own.refusal) - 1);
    rank.refusals_[static_cast<size_t>(peer)] = error.what();
  }
  send_hello(connection, own, rank.memory_, rank.heap_);
}

Endpoint::Endpoint(int rank, int world_size, std::function<UniqueFd()> make_memory,
                   size_t num_bytes)
    : rank_(rank),
      num_bytes_(num_bytes),
      make_memory_(std::move(make_memory)),
      heap_(per_process<Heap>().memory()),
      token_(random_number()),
      listener_(Listener::open()),
      peers_(static_cast<size_t>(world_size)),
      refusals_(static_cast<size_t>(world_size)) {
  listener_->add(*this);
}

Endpoint::~Endpoint() { listener_->remove(*this); }

std::string Endpoint::address() const { return join(listener_->name(), ' ', token_); }

bool Endpoint::has_peer(int peer) const {
  const std::lock_guard lock(listener_->mutex());
  return peers_[static_cast<size_t>(peer)].has_value();
}

void Endpoint::prepare() {
  const std::lock_guard lock(listener_->mutex());
  make_memory_once();
}

void Endpoint::make_memory_once() {
  if (memory_.get() < 0) memory_ = make_memory_();
}

void Endpoint::connect(int peer, const std::string& peer_address,
                       const std::function<void()>& check) {
  if (has_peer(peer)) return;
  try {
    handshake(peer, peer_address, check);
  } catch (const Error&) {
    const std::lock_guard lock(listener_->mutex());
    // The peer may have connected to this rank meanwhile, and closed its endpoint afterwards.
    if (peers_[static_cast<size_t>(peer)]) return;
    // Or it gave up because this rank refused it: then the refusal is the cause to report.
    std::string& refusal = refusals_[static_cast<size_t>(peer)];
    if (!refusal.empty()) throw Error(ErrorKind::kTransport, std::exchange(refusal, {}));
    throw;
  }
}

void Endpoint::handshake(int peer, const std::string& peer_address,
                         const std::function<void()>& check) {
  std::istringstream parts(peer_address);
  std::string name;
  uint64_t token = 0;
  parts >> name >> token;
  const UniqueFd connection = open_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (::connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fail(join(with_errno(join("cannot connect to rank ", peer), errno),
              "; has it left the group, has its process ended, or do two machines have the same "
              "ROTA_HOST_ID?"));
  }
  const std::shared_ptr<PeerProcess> process = process_of(connection);
  if (!send_hello(connection, {kHelloMagic, token, static_cast<uint64_t>(rank_), {}}, memory_,
                  heap_)) {
    fail(with_errno(join("cannot send to rank ", peer), errno));
  }
  // A forked child of the peer may keep the socket open after the peer has died.
  pollfd ready{.fd = connection.get(), .events = POLLIN, .revents = 0};
  while (poll(&ready, 1, kPollSliceMs) <= 0) {
    check();
    if (!PeerProcess::find_ended({process.get()}).empty()) {
      fail(join("the process of rank ", peer, " has ended"));
    }
  }
  const ReceivedHello received = receive_hello(connection);
  if (!received.is_there || received.hello.token != token ||
      received.hello.rank != static_cast<uint64_t>(peer)) {
    fail(join("rank ", peer, " has left the group; make a new one on every rank"));
  }
  if (received.hello.refusal[0] != '\0') {
    fail(join("rank ", peer, " refused the handshake: ", received.hello.refusal));
  }
  Peer mapped = map(peer, process, received.memory, received.heap);
  const std::lock_guard lock(listener_->mutex());
  std::optional<Peer>& place = peers_[static_cast<size_t>(peer)];
  if (!place) place.emplace(std::move(mapped));  // otherwise both sides have connected at once
}

Peer Endpoint::map(int peer, std::shared_ptr<PeerProcess> process, const UniqueFd& memory,
                   const UniqueFd& heap) const {
  if (memory.get() < 0) {
    fail(with_errno("cannot take over a peer's memory", EMFILE) + "; raise `ulimit -n`");
  }
  Mapping region = map_peer(memory, num_bytes_, peer);
  process->take_heap(heap);
  return {std::move(process), std::move(region)};
}

std::vector<std::optional<Peer>> Endpoint::take_peers() {
  const std::lock_guard lock(listener_->mutex());
  return std::move(peers_);
}

}  // namespace rota::transport
