// One message each way between two processes of a host, with which they exchange descriptors of
// memory: over a UNIX socket, so the kernel vouches for the process at the other end.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <istream>
#include <memory>
#include <string>
#include <vector>

#include "transport/peer_processes.h"
#include "transport/unique_fd.h"

namespace rota::transport {

inline constexpr int kPollSliceMs = 50;  // the longest delay until Ctrl-C is noticed

struct Hello {
  uint64_t magic = 0x0138'6174'6f72ULL;  // "rota8", changed with the layout of what is mapped
  uint64_t token;                        // of the Exposed that the client asks for
  uint64_t rank;                         // of the sender, where ranks connect
  char refusal[232] = {};                // in a reply: why the client was refused; else empty

  void refuse(const std::string& why);
};

struct ReceivedHello {
  bool is_there = false;  // false: the peer hung up or sent something else
  Hello hello{};
  // Empty also if this process is out of descriptors.
  std::vector<UniqueFd> descriptors;
};

uint64_t random_number();

// A socket that listens at an abstract name: no file, so nothing to clean up after a kill.
UniqueFd listen_at(const std::string& name);

// Whether the other end is closed, if only because its process has ended.
bool has_hung_up(const UniqueFd& connection);
void wait_until_hung_up(const UniqueFd& connection);

bool send_hello(const UniqueFd& connection, const Hello& hello,
                std::initializer_list<const UniqueFd*> descriptors);
ReceivedHello receive_hello(const UniqueFd& connection);

// The process at the other end. Throws Error(kTransport) if it is another user's.
std::shared_ptr<PeerProcess> process_of(const UniqueFd& connection);

// What a client names: a listener and one of its tokens.
struct Address {
  std::string listener;
  uint64_t token = 0;

  std::string to_string() const;
  // Reads what to_string() has written; text may follow.
  static Address read(std::istream& text);
};

// The answer of a listener to a Hello of this process.
struct Answer {
  std::shared_ptr<PeerProcess> process;
  std::vector<UniqueFd> descriptors;
  UniqueFd connection;  // the listener's process may keep its end, and then sees this one's end
};

// Sends a Hello and waits for the answer. who: "rank 1". check runs several times a second and may
// throw. Throws Error(kTransport) if the other process has ended, refuses, or exposes no such token
// any more.
Answer ask(const Address& address, uint64_t own_rank,
           std::initializer_list<const UniqueFd*> descriptors, const std::string& who,
           const std::string& gone, const std::function<void()>& check);

}  // namespace rota::transport
