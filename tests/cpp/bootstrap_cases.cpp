// How ranks find each other: hosts and layouts that differ, and connections from strangers.
#include "transport/bootstrap.h"

#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
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

using transport::Hello;
using transport::SharedMemoryRank;
using transport::UniqueFd;

struct Arguments {
  transport::Geometry geometry = kSmall;
  const char* host = "one host";
};

std::unique_ptr<transport::Transport> connect_with(FileStore& store, int rank, int world_size,
                                                   const Arguments& arguments) {
  setenv("ROTA_HOST_ID", arguments.host, 1);
  return SharedMemoryRank(store, rank, world_size, arguments.geometry).connect(kPatience, [] {});
}

using Texts = std::vector<std::string>;

// Ranks with these arguments fail to connect; every error contains all of `parts`.
void unfit_ranks_are_told(const std::vector<Arguments>& ranks, const Texts& parts) {
  const auto world_size = static_cast<int>(ranks.size());
  run_processes(world_size, [&](int rank, FileStore& store) {
    const int64_t num_files = num_open_files();
    const Error error = expect_error(ErrorKind::kTransport, [&] {
      connect_with(store, rank, world_size, ranks[static_cast<size_t>(rank)]);
    });
    for (const std::string& part : parts) check_contains(error.what(), part);
    check_num_open_files(num_files, "descriptors after an error");
  });
}

void cards_are_read_whatever_the_host_and_the_locale() {
  run_processes(2, [](int rank, FileStore& store) {
    if (rank == 1) group_digits();
    const auto transport = connect_with(store, rank, 2, {.host = " one  host "});
    check_equal(transport->world_size(), 2, "ranks of the host");
  });
}

void send_greeting(const UniqueFd& connection, Hello hello, size_t num_bytes,
                   size_t num_descriptors) {
  iovec part{&hello, num_bytes};
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

// A stranger who knows what rank 0 has put into the store connects to it before rank 1 does. The
// stranger is ignored and leaves no descriptors behind.
void stranger_is_ignored(
    const std::function<void(const UniqueFd& connection, uint64_t token)>& speak) {
  const TemporaryDirectory directory;
  FileStore store(directory);
  const auto run_rank = [&](int rank) {
    return start_process([&, rank] {
      const int64_t num_files = num_open_files();
      {
        Communicator communicator = make_communicator(store, rank, 2);
        check_num_open_files(num_files + 2, "descriptors beside the strangers'");
        call_and_check(communicator, {.num_elems = 5000}, 1);
      }
      check_num_open_files(num_files, "descriptors at the end");
    });
  };
  const pid_t rank_0 = run_rank(0);
  std::string number, name;
  uint64_t token = 0;
  std::istringstream(store.await("cards")) >> number >> name >> token;
  sockaddr_un address{.sun_family = AF_UNIX};
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  const UniqueFd connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  check(connect(connection.get(), reinterpret_cast<sockaddr*>(&address),
                static_cast<socklen_t>(length)) == 0,
        "connect");
  speak(connection, token);
  check_equal(wait_for_process(run_rank(1)), Exit{}, "end of rank 1");
  check_equal(wait_for_process(rank_0), Exit{}, "end of rank 0");
}

// hello.token: how far it is from the right one.
void stranger_with_wrong_greeting(Hello hello, size_t num_bytes, size_t num_descriptors) {
  stranger_is_ignored([&](const UniqueFd& connection, uint64_t token) {
    hello.token += token;
    send_greeting(connection, hello, num_bytes, num_descriptors);
  });
}

constexpr transport::Geometry kOtherCells{
    .message_bytes = kSmall.message_bytes, .slot_bytes = kSmall.slot_bytes, .num_cells = 12};

constexpr size_t kWhole = sizeof(Hello);

const CaseTable kCases{
    {"bootstrap_layouts_differ", unfit_ranks_are_told, std::vector<Arguments>{{}, {kOtherCells}},
     Texts{"rank 0", "same version"}},
    {"bootstrap_hosts_differ", unfit_ranks_are_told,
     std::vector<Arguments>{{}, {.host = "another host"}},
     Texts{"is on host", "one host", "another host"}},
    {"bootstrap_host_of_two_lines", unfit_ranks_are_told,
     std::vector<Arguments>{{.host = "one\nhost"}},
     Texts{"ROTA_HOST_ID is 'one\nhost', expected text without a line break"}},
    {"bootstrap_cards", cards_are_read_whatever_the_host_and_the_locale},
    {"stranger_hangs_up", stranger_is_ignored,
     [](const UniqueFd& connection, uint64_t) { shutdown(connection.get(), SHUT_RDWR); }},
    {"stranger_without_magic", stranger_with_wrong_greeting, Hello{.magic = 0x1234, .rank = 1},
     kWhole, 2},
    {"stranger_without_token", stranger_with_wrong_greeting, Hello{.token = 1, .rank = 1}, kWhole,
     2},
    {"stranger_short_greeting", stranger_with_wrong_greeting, Hello{.rank = 1}, kWhole - 8, 2},
    {"stranger_without_memory", stranger_with_wrong_greeting, Hello{.rank = 1}, kWhole, 0},
    {"stranger_wrong_memory", stranger_with_wrong_greeting, Hello{.rank = 1}, kWhole, 2},
    {"stranger_own_rank", stranger_with_wrong_greeting, Hello{.rank = 0}, kWhole, 2},
    {"stranger_rank_outside_world", stranger_with_wrong_greeting, Hello{.rank = 1u << 31}, kWhole,
     2},
    {"stranger_one_descriptor", stranger_with_wrong_greeting, Hello{.rank = 1}, kWhole, 1},
    {"stranger_three_descriptors", stranger_with_wrong_greeting, Hello{.rank = 1}, kWhole, 3},
};

}  // namespace
}  // namespace rota::test
