#include "transport/handshake.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/per_process.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; Debian 12's headers are older than that
#endif

namespace rota::transport {
namespace {

constexpr size_t kMostDescriptors = 2;  // of one message

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract.
  if (name.size() >= sizeof(address.sun_path)) fail_transport("an address is damaged");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd open_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail_transport(with_errno("socket", errno) + "; raise `ulimit -n`");
  return fd;
}

// The buffers of one message, sent or received: a Hello and its descriptors.
struct HelloMessage {
  explicit HelloMessage(Hello& hello) : part{&hello, sizeof(hello)} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }

  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr header = {};
};

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

pid_t pid_of_own_user(const UniqueFd& connection) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  // Any user may connect to an abstract address; only this user's processes are trusted.
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
      credentials.uid != geteuid()) {
    fail_transport("a stranger's connection");
  }
  return credentials.pid;
}

}  // namespace

void Hello::refuse(const std::string& why) {
  std::strncpy(refusal, why.c_str(), sizeof(refusal) - 1);
}

uint64_t random_number() {
  uint64_t number;
  if (getrandom(&number, sizeof(number), 0) != static_cast<ssize_t>(sizeof(number))) {
    fail_transport(with_errno("getrandom", errno));
  }
  return number;
}

UniqueFd listen_at(const std::string& name) {
  UniqueFd listener = open_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fail_transport(with_errno("bind", errno));
  }
  if (listen(listener.get(), SOMAXCONN) != 0) fail_transport(with_errno("listen", errno));
  return listener;
}

bool has_hung_up(const UniqueFd& connection) {
  pollfd state{.fd = connection.get(), .events = 0, .revents = 0};
  return poll(&state, 1, 0) == 1 && (state.revents & POLLHUP) != 0;
}

void wait_until_hung_up(const UniqueFd& connection) {
  pollfd state{.fd = connection.get(), .events = 0, .revents = 0};
  while (poll(&state, 1, -1) != 1) continue;  // interrupted
}

bool send_hello(const UniqueFd& connection, const Hello& hello,
                std::initializer_list<const UniqueFd*> descriptors) {
  Hello sent = hello;
  HelloMessage message(sent);
  if (descriptors.size() == 0) {
    message.header.msg_controllen = 0;
    return sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) == sizeof(sent);
  }
  int numbers[kMostDescriptors];
  std::ranges::transform(descriptors, numbers, &UniqueFd::get);
  const size_t num_bytes = descriptors.size() * sizeof(int);
  message.header.msg_controllen = CMSG_SPACE(num_bytes);
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(num_bytes);
  std::memcpy(CMSG_DATA(control), numbers, num_bytes);
  return sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) == sizeof(sent);
}

ReceivedHello receive_hello(const UniqueFd& connection) {
  ReceivedHello received;
  HelloMessage message(received.hello);
  ssize_t num_received;
  do {
    num_received = recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC);
  } while (num_received < 0 && errno == EINTR);
  if (num_received < 0) return received;
  received.hello.refusal[sizeof(received.hello.refusal) - 1] = '\0';
  received.descriptors = take_descriptors(message.header);
  // Some of the descriptors are as bad as none.
  if ((message.header.msg_flags & MSG_CTRUNC) != 0) received.descriptors.clear();
  received.is_there = num_received == sizeof(Hello) && received.hello.magic == Hello{}.magic;
  return received;
}

std::shared_ptr<PeerProcess> process_of(const UniqueFd& connection) {
  const pid_t pid = pid_of_own_user(connection);
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) != 0) {
    fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  }
  if (fd < 0) {
    fail_transport(
        join(with_errno("pidfd_open", errno), " for pid ", pid,
             "; rota needs Linux 5.3 and ranks in one PID namespace to notice a peer's death"));
  }
  return per_process<PeerProcesses>().find(pid, UniqueFd(fd));
}

std::string Address::to_string() const { return join(listener, ' ', token); }

Address Address::read(std::istream& text) {
  Address address;
  text >> address.listener >> address.token;
  return address;
}

Answer ask(const Address& address, uint64_t own_rank,
           std::initializer_list<const UniqueFd*> descriptors, const std::string& who,
           const std::string& gone, const std::function<void()>& check) {
  UniqueFd connection = open_socket();
  sockaddr_un place;
  const socklen_t length = abstract_address(address.listener, place);
  if (::connect(connection.get(), reinterpret_cast<sockaddr*>(&place), length) != 0) {
    fail_transport(join(with_errno(join("cannot connect to ", who), errno),
                        "; has it left the group, has its process ended, or do two machines have "
                        "the same ROTA_HOST_ID?"));
  }
  std::shared_ptr<PeerProcess> process = process_of(connection);
  if (!send_hello(connection, {.token = address.token, .rank = own_rank}, descriptors)) {
    fail_transport(with_errno(join("cannot send to ", who), errno));
  }
  // A forked child of the peer may keep the socket open after the peer has died.
  pollfd ready{.fd = connection.get(), .events = POLLIN, .revents = 0};
  while (poll(&ready, 1, kPollSliceMs) <= 0) {
    check();
    if (!PeerProcess::find_ended({process.get()}).empty()) {
      fail_transport(join("the process of ", who, " has ended"));
    }
  }
  ReceivedHello received = receive_hello(connection);
  if (!received.is_there || received.hello.token != address.token) fail_transport(gone);
  if (received.hello.refusal[0] != '\0') {
    fail_transport(join(who, " refused the handshake: ", received.hello.refusal));
  }
  return {std::move(process), std::move(received.descriptors), std::move(connection)};
}

}  // namespace rota::transport
