// How ranks find each other: hosts and layouts that differ, and connections from strangers.
#include "transport/bootstrap.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <sstream>

#include "calls.h"
#include "check.h"
#include "grouped_digits.h"
#include "open_files.h"
#include "processes.h"
#include "ranks.h"
#include "transport/shared_memory.h"

namespace rota::test {
namespace {

using transport::SharedMemoryRank;
using transport::UniqueFd;

// ---- ranks with arguments that do not match ----

struct Arguments {
  int rank;
  int world_size;
  transport::Geometry geometry = kSmall;
  const char* host = "one host";
};

std::unique_ptr<transport::Transport> connect_with(const TemporaryDirectory& directory,
                                                   const Arguments& arguments) {
  setenv("ROTA_HOST_ID", arguments.host, 1);
  FileStore store(directory);
  return SharedMemoryRank(store, arguments.rank, arguments.world_size, arguments.geometry)
      .connect(kPatience, [] {});
}

// All ranks with these arguments fail to connect; every error contains all of `parts`.
void unfit_ranks_are_told(const std::vector<Arguments>& ranks,
                          const std::vector<std::string>& parts) {
  const TemporaryDirectory directory;
  run_processes(static_cast<int>(ranks.size()), [&](int index) {
    const int64_t num_files = num_open_files();
    const Error error = expect_error(
        ErrorKind::kTransport, [&] { connect_with(directory, ranks[static_cast<size_t>(index)]); });
    for (const std::string& part : parts) check_contains(error.what(), part);
    check_num_open_files(num_files, "descriptors after an error");
  });
}

void cards_are_read_whatever_the_host_and_the_locale() {
  const TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    std::optional<GroupedDigits> locale;
    if (rank == 1) locale.emplace();
    const auto transport =
        connect_with(directory, {.rank = rank, .world_size = 2, .host = " one  host "});
    check_equal(transport->world_size(), 2, "ranks of the host");
  });
}

// ---- strangers ----

// Laid out as Hello in transport/handshake.h. The magic number is not repeated here: the tests
// read it from rank 0's greeting.
struct Greeting {
  uint64_t magic = 0;
  uint64_t token = 0;
  uint64_t rank = 0;
  char refusal[232] = {};
};
constexpr size_t kWhole = sizeof(Greeting);
constexpr size_t kNumDescriptors = 2;  // sent with it

// A socket of the type that endpoints use.
UniqueFd open_socket() { return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)); }

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Publishes itself under a rank's key and accepts connections, but never answers or connects.
class SilentRank {
 public:
  SilentRank(const TemporaryDirectory& directory, int rank) : socket_(open_socket()) {
    FileStore store(directory);
    std::istringstream card(store.await("cards"));
    std::string rank_0, address_of_rank_0, rest;
    std::getline(card >> rank_0 >> address_of_rank_0, rest);
    const std::string name = join("rota-test-", getpid(), '-', rank);
    sockaddr_un address;
    const socklen_t length = address_of(name, address);
    check(bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0, "bind");
    check(listen(socket_.get(), 4) == 0, "listen");
    store.append("cards", join(rank, ' ', name, rest, '\n'));
  }

  // Rank 0 then waits for an answer.
  Greeting greeting_of_rank_0() {
    connection_ = UniqueFd(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Greeting greeting;
    check(recv(connection_.get(), &greeting, sizeof(greeting), 0) == sizeof(greeting), "recv");
    return greeting;
  }

 private:
  UniqueFd socket_, connection_;
};

struct Interruption : std::exception {};

// The magic number of the handshake, from the greeting of a rank 0 that then gives up.
uint64_t overhear_magic() {
  const TemporaryDirectory directory;
  const pid_t rank_0 = start_process([&] {
    FileStore store(directory);
    const auto give_up = [&] {
      if (store.has("overheard")) throw Interruption();
    };
    try {
      SharedMemoryRank(store, 0, 2, kSmall).connect(kPatience, give_up);
    } catch (const Interruption&) {
      return;
    }
    fail("connect() returned");
  });
  SilentRank rank_1(directory, 1);
  const Greeting greeting = rank_1.greeting_of_rank_0();
  FileStore(directory).set("overheard", "1");
  check_equal(greeting.rank, uint64_t{0}, "rank 0's number in its greeting");
  check_equal(wait_for_process(rank_0), Exit{}, "end of rank 0");
  return greeting.magic;
}

void send_greeting(const UniqueFd& connection, Greeting greeting, size_t num_bytes,
                   size_t num_descriptors) {
  iovec part{&greeting, num_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  const UniqueFd memory(memfd_create("rota-test", MFD_CLOEXEC));
  const int descriptors[] = {memory.get(), memory.get(), memory.get()};
  const size_t descriptor_bytes = num_descriptors * sizeof(int);
  if (num_descriptors > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(descriptor_bytes);
    cmsghdr* message = CMSG_FIRSTHDR(&header);
    message->cmsg_level = SOL_SOCKET;
    message->cmsg_type = SCM_RIGHTS;
    message->cmsg_len = CMSG_LEN(descriptor_bytes);
    std::memcpy(CMSG_DATA(message), descriptors, descriptor_bytes);
  }
  check(sendmsg(connection.get(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(num_bytes),
        "sendmsg");
}

struct ConnectionToRank0 {
  UniqueFd socket;
  uint64_t token;
};

// Uses the address and the token that rank 0 has put into the store.
ConnectionToRank0 connect_to_rank_0(const TemporaryDirectory& directory) {
  ConnectionToRank0 connection{open_socket(), 0};
  std::string rank_0, name;
  std::istringstream(FileStore(directory).await("cards")) >> rank_0 >> name >> connection.token;
  sockaddr_un address;
  const socklen_t length = address_of(name, address);
  check(connect(connection.socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0,
        "connect");
  return connection;
}

// A stranger who knows what rank 0 has put into the store connects to it before rank 1 does. The
// stranger is ignored and leaves no descriptors behind.
void stranger_is_ignored(
    const std::function<void(const UniqueFd& connection, uint64_t token)>& speak) {
  const TemporaryDirectory directory;
  const auto run_rank = [&](int rank) {
    return start_process([&, rank] {
      const int64_t num_files = num_open_files();
      {
        Communicator communicator(connect(directory, rank, 2), kPatience, [] {});
        check_num_open_files(num_files + 2, "descriptors beside the strangers'");
        call_and_check(communicator, {.num_elems = 5000}, 1);
      }
      check_num_open_files(num_files, "descriptors at the end");
    });
  };
  const pid_t rank_0 = run_rank(0);
  const ConnectionToRank0 connection = connect_to_rank_0(directory);
  speak(connection.socket, connection.token);
  check_equal(wait_for_process(run_rank(1)), Exit{}, "end of rank 1");
  check_equal(wait_for_process(rank_0), Exit{}, "end of rank 0");
}

void stranger_who_hangs_up() {
  stranger_is_ignored(
      [](const UniqueFd& connection, uint64_t) { shutdown(connection.get(), SHUT_RDWR); });
}

struct Known {
  bool magic = true;
  bool token = true;
};

void stranger_with_wrong_greeting(Known known, uint64_t rank, size_t num_bytes,
                                  size_t num_descriptors) {
  const uint64_t magic = known.magic ? overhear_magic() : 0x1234;
  stranger_is_ignored([&](const UniqueFd& connection, uint64_t token) {
    send_greeting(connection, {magic, known.token ? token : token + 1, rank}, num_bytes,
                  num_descriptors);
  });
}

// Rank 1 hands over unusable memory, is refused and leaves. Rank 0 must report the refusal, not
// just that rank 1 has left.
void rank_that_had_to_refuse_says_so() {
  const TemporaryDirectory directory;
  const uint64_t magic = overhear_magic();
  const pid_t rank_0 = start_process([&] {
    FileStore store(directory);
    const Error error = expect_error(ErrorKind::kTransport, [&] {
      SharedMemoryRank(store, 0, 2, kSmall).connect(kPatience, [] {});
    });
    check_contains(error.what(), "rank 1 handed over memory that is not sealed");
  });
  {
    const SilentRank rank_1(directory, 1);
    const ConnectionToRank0 connection = connect_to_rank_0(directory);
    send_greeting(connection.socket, {magic, connection.token, 1}, kWhole, kNumDescriptors);
    char answer;
    check(recv(connection.socket.get(), &answer, sizeof(answer), 0) == 1, "the refusal");
  }
  check_equal(wait_for_process(rank_0), Exit{}, "end of rank 0");
}

constexpr transport::Geometry kOtherCells{
    .message_bytes = kSmall.message_bytes, .slot_bytes = kSmall.slot_bytes, .num_cells = 12};

const CaseTable kCases{
    {"bootstrap_layouts_differ",
     [] { unfit_ranks_are_told({{0, 2}, {1, 2, kOtherCells}}, {"rank 0", "same version"}); }},
    {"bootstrap_hosts_differ",
     [] {
       unfit_ranks_are_told({{0, 2}, {1, 2, kSmall, "another host"}},
                            {"is on host", "one host", "another host"});
     }},
    {"bootstrap_host_of_two_lines",
     [] {
       unfit_ranks_are_told({{0, 1, kSmall, "one\nhost"}},
                            {"ROTA_HOST_ID is 'one\nhost', expected text without a line break"});
     }},
    {"bootstrap_cards", cards_are_read_whatever_the_host_and_the_locale},
    {"stranger_hangs_up", stranger_who_hangs_up},
    {"stranger_without_magic",
     [] { stranger_with_wrong_greeting({.magic = false}, 1, kWhole, kNumDescriptors); }},
    {"stranger_without_token",
     [] { stranger_with_wrong_greeting({.token = false}, 1, kWhole, kNumDescriptors); }},
    {"stranger_short_greeting",
     [] { stranger_with_wrong_greeting({}, 1, kWhole - 8, kNumDescriptors); }},
    {"stranger_without_memory", [] { stranger_with_wrong_greeting({}, 1, kWhole, 0); }},
    {"stranger_wrong_memory", [] { stranger_with_wrong_greeting({}, 1, kWhole, kNumDescriptors); }},
    {"stranger_own_rank", [] { stranger_with_wrong_greeting({}, 0, kWhole, kNumDescriptors); }},
    {"stranger_rank_outside_world",
     [] { stranger_with_wrong_greeting({}, 1u << 31, kWhole, kNumDescriptors); }},
    {"stranger_one_descriptor", [] { stranger_with_wrong_greeting({}, 1, kWhole, 1); }},
    {"stranger_three_descriptors", [] { stranger_with_wrong_greeting({}, 1, kWhole, 3); }},
    {"bootstrap_refused", rank_that_had_to_refuse_says_so},
};

}  // namespace
}  // namespace rota::test
