#include "transport/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/per_process.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older than that
#endif

namespace rota::transport {
namespace {

constexpr uint64_t kHelloMagic = 0x0134'6174'6f72ULL;  // "rota4", changed with the layout
constexpr int kStorePollMs = 2;   // a store may be a server: a few requests while a peer starts
constexpr int kPollSliceMs = 50;  // how late a Ctrl-C may be noticed

struct Hello {
  uint64_t magic;
  uint64_t rank;
};

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorKind::kTransport, join("rota: ", what));
}

std::string random_address() {
  std::array<unsigned char, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail(with_errno("getrandom", errno));
  }
  static constexpr char kHex[] = "0123456789abcdef";
  std::string address = "rota-";
  for (const unsigned char byte : bytes) {
    address += kHex[byte >> 4];
    address += kHex[byte & 15];
  }
  return address;
}

// An abstract name (leading zero byte): no file, so nothing to clean up after a kill.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd open_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail(with_errno("socket", errno));
  return fd;
}

UniqueFd listen_at(const std::string& name, int backlog) {
  UniqueFd listener = open_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fail(with_errno("bind", errno));
  }
  if (listen(listener.get(), backlog) != 0) fail(with_errno("listen", errno));
  return listener;
}

// A message of one Hello and at most one descriptor, for both directions.
struct HelloMessage {
  explicit HelloMessage(Hello& hello) : part{&hello, sizeof(hello)} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }

  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
};

// The descriptor that came with a message; none if there is not exactly one. Padding leaves room
// for two, and what the kernel has handed over must be closed.
UniqueFd take_descriptor(msghdr& header) {
  cmsghdr* control = CMSG_FIRSTHDR(&header);
  if (control == nullptr || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
    return UniqueFd();
  }
  std::vector<UniqueFd> descriptors;
  for (size_t offset = 0; CMSG_LEN(offset + sizeof(int)) <= control->cmsg_len;
       offset += sizeof(int)) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(control) + offset, sizeof(fd));
    descriptors.emplace_back(fd);
  }
  return descriptors.size() == 1 ? std::move(descriptors[0]) : UniqueFd();
}

// Blocks for the message of a peer that has connected and is about to send it; bounded, so that who
// connects and stays silent does not hold up the others for ever.
ssize_t receive_hello(const UniqueFd& connection, msghdr& header) {
  const timeval patience{.tv_sec = 1, .tv_usec = 0};
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ssize_t num_received;
  do {
    num_received = recvmsg(connection.get(), &header, MSG_CMSG_CLOEXEC);
  } while (num_received < 0 && errno == EINTR);
  return num_received;
}

UniqueFd open_process(const UniqueFd& connection, pid_t pid) {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) {
    return UniqueFd(fd);
  }
  UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (process.get() < 0) {
    fail(join(with_errno("pidfd_open", errno), " for pid ", pid,
              "; rota needs Linux 5.3 and ranks in one PID namespace to notice a peer's death"));
  }
  return process;
}

}  // namespace

Bootstrap::Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
                     std::chrono::milliseconds timeout, std::function<void()> check_interrupt)
    : store_(store),
      rank_(rank),
      world_size_(world_size),
      geometry_(geometry),
      deadline_(std::chrono::steady_clock::now() + timeout),
      check_interrupt_(std::move(check_interrupt)) {}

std::vector<Introduction> Bootstrap::exchange(const UniqueFd& own_memory) {
  claim_rank();
  const std::string address = random_address();
  const UniqueFd listener = listen_at(address, world_size_);
  publish_card(address);
  // All cards first: a rank that differs is then named by everybody, before those that have read
  // its card give up and cannot be connected to any more.
  std::vector<std::string> addresses(static_cast<size_t>(world_size_));
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) addresses[static_cast<size_t>(peer)] = address_of(peer);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) send_memory(peer, addresses[static_cast<size_t>(peer)], own_memory);
  }
  std::vector<Introduction> introductions = receive_all(listener);
  store_.add(join("claim/", rank_), -1);  // another group may follow over the same store
  return introductions;
}

void Bootstrap::claim_rank() {
  if (rank_ < 0 || rank_ >= world_size_) {
    fail(join("rank ", rank_, " is not in [0, ", world_size_, ")"));
  }
  if (store_.add(join("claim/", rank_), 1) != 1) {
    fail(join("two processes say they are rank ", rank_, " of ", world_size_,
              "; give each process its own RANK"));
  }
  incarnation_ = store_.add(join("made/", rank_), 1);
}

// One line per rank: address, world size, geometry; the rest of the line is the host.
void Bootstrap::publish_card(const std::string& address) {
  store_.set(card_key(rank_),
             join(address, ' ', world_size_, ' ', geometry_.message_bytes, ' ',
                  geometry_.slot_bytes, ' ', geometry_.link_slot_bytes, ' ', host_id()));
}

std::string Bootstrap::card_key(int rank) const { return join("card/", incarnation_, '/', rank); }

std::string Bootstrap::read_card(int peer) {
  const std::string key = card_key(peer);
  // Asked for again and again, rather than awaited in the store, so that a signal gets through.
  while (!store_.has(key)) {
    check_interrupt_();
    if (std::chrono::steady_clock::now() >= deadline_) {
      fail(join("rank ", rank_, "/", world_size_, " still waits for rank ", peer,
                " to start; has its process ended?"));
    }
    poll(nullptr, 0, kStorePollMs);
  }
  return store_.get(key);
}

std::string Bootstrap::address_of(int peer) {
  std::istringstream card(read_card(peer));
  std::string address, host;
  int world_size = 0;
  Geometry geometry{};
  card >> address >> world_size >> geometry.message_bytes >> geometry.slot_bytes >>
      geometry.link_slot_bytes;
  std::getline(card >> std::ws, host);
  if (world_size != world_size_) {
    fail(join("rank ", peer, " has world_size ", world_size, ", this rank ", rank_, " has ",
              world_size_, "; start every rank with the same WORLD_SIZE"));
  }
  if (geometry != geometry_) {
    fail(join("rank ", peer, " has slots of ", geometry.slot_bytes, " bytes, this rank ", rank_,
              " of ", geometry_.slot_bytes, "; give every rank the same slot_bytes"));
  }
  if (host != host_id()) {
    fail(join("rank ", peer, " is on host ", host, ", rank ", rank_, " on ", host_id(),
              "; this version connects the ranks of one host: make one group per host, or use "
              "Gloo or NCCL between hosts"));
  }
  return address;
}

void Bootstrap::send_memory(int peer, const std::string& peer_address, const UniqueFd& own_memory) {
  const UniqueFd connection = open_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(peer_address, address);
  if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fail(
        join(with_errno(join("cannot connect to rank ", peer), errno), "; has its process ended?"));
  }
  Hello hello{kHelloMagic, static_cast<uint64_t>(rank_)};
  HelloMessage message(hello);
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = own_memory.get();
  std::memcpy(CMSG_DATA(control), &fd, sizeof(fd));
  if (sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) != sizeof(hello)) {
    fail(with_errno(join("cannot send to rank ", peer), errno));
  }
}

std::vector<Introduction> Bootstrap::receive_all(const UniqueFd& listener) {
  std::vector<Introduction> introductions(static_cast<size_t>(world_size_));
  const auto is_missing = [&](int peer) {
    return peer != rank_ && introductions[static_cast<size_t>(peer)].memory.get() < 0;
  };
  for (int num_missing = world_size_ - 1; num_missing > 0;) {
    pollfd ready{.fd = listener.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, kPollSliceMs) <= 0) {
      check_interrupt_();
      if (std::chrono::steady_clock::now() < deadline_) continue;
      std::string missing;
      for (int peer = 0; peer < world_size_; ++peer) {
        if (is_missing(peer)) missing += join(missing.empty() ? "" : ", ", peer);
      }
      fail(join("rank ", rank_, "/", world_size_, " still waits for rank ", missing,
                " to connect; are these processes alive?"));
    }
    const UniqueFd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ucred credentials{};
    socklen_t length = sizeof(credentials);
    if (connection.get() < 0 && errno != ECONNABORTED && errno != EINTR) {
      fail(with_errno("cannot accept a peer's connection", errno));
    }
    if (connection.get() < 0 ||
        getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
      continue;  // it hung up again
    }
    // Anybody may connect to an abstract address; only the own user is listened to.
    if (credentials.uid != geteuid()) continue;
    Hello hello{};
    HelloMessage message(hello);
    const ssize_t num_received = receive_hello(connection, message.header);
    if ((message.header.msg_flags & MSG_CTRUNC) != 0 && message.header.msg_controllen == 0) {
      fail(with_errno("cannot take over a peer's memory", EMFILE) + "; raise `ulimit -n`");
    }
    UniqueFd memory = take_descriptor(message.header);
    const int peer =
        hello.rank < static_cast<uint64_t>(world_size_) ? static_cast<int>(hello.rank) : rank_;
    if (num_received != sizeof(hello) || hello.magic != kHelloMagic || memory.get() < 0 ||
        !is_missing(peer)) {
      continue;  // a stranger
    }
    UniqueFd pidfd = open_process(connection, credentials.pid);
    introductions[static_cast<size_t>(peer)] = {
        per_process<Host>().find_process(credentials.pid, std::move(pidfd)), std::move(memory)};
    --num_missing;
  }
  return introductions;
}

}  // namespace rota::transport
