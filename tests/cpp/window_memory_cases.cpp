// The memory of windows, opened by its address: what openers see, and when its place is used again.
#include "transport/window_memory.h"

#include <cstring>

#include "base/per_process.h"
#include "check.h"
#include "core/window_watch.h"
#include "cpu/checksum.h"
#include "random.h"
#include "ranks.h"
#include "transport/heap.h"

namespace rota::test {
namespace {

using transport::Heap;
using transport::OpenedWindow;
using transport::WindowAccess;
using transport::WindowMemory;

std::span<std::byte> allocate(size_t num_bytes) {
  return {static_cast<std::byte*>(per_process<Heap>().allocate(num_bytes)), num_bytes};
}

std::shared_ptr<OpenedWindow> open(const std::string& address) {
  return OpenedWindow::open(address, "rank 1", [] {});
}

void closed_window_is_seen_and_not_opened() {
  const std::span<std::byte> block = allocate(64);
  auto memory = std::make_unique<WindowMemory>(block, 1, WindowAccess::kRead);
  const std::string address = memory->address();
  const auto opened = open(address);
  publish_word(memory->view(), 0, 3);
  memory.reset();
  per_process<Heap>().release(block.data());
  expect_error(ErrorKind::kTransport, [&] { open(address); }, {"rank 1"});
  check_equal(opened->view().control->closed.load(), 1, "closed");
  check_equal(opened->view().control->word(0).load(), 3, "its last word");
  expect_error(ErrorKind::kPeerFailed,
               [&] { wait_word(*opened, 0, 4, kPatience, "rank 1", [] {}); },
               {"waits in vain for rank 1"});
}

// Otherwise a late write would damage the tensor that lies there next, and a late read find zeroes.
void place_is_used_again_once_nobody_maps_it() {
  const std::span<std::byte> block = allocate(5 * 4096);
  auto memory = std::make_unique<WindowMemory>(block, 1, WindowAccess::kWrite);
  auto opened = open(memory->address());
  auto last_opened = open(memory->address());
  block[1] = std::byte{2};
  memory.reset();
  per_process<Heap>().release(block.data());
  opened.reset();
  const std::span<std::byte> next = allocate(5 * 4096);
  check(next.data() != block.data(), "the place is still mapped");
  check(last_opened->view().data[1] == std::byte{2}, "its contents are still there");
  last_opened->view().data[0] = std::byte{1};
  last_opened.reset();
  std::span<std::byte> last = allocate(5 * 4096);
  const auto is_back = [&] {
    if (last.data() == block.data()) return true;
    per_process<Heap>().release(last.data());
    last = allocate(5 * 4096);
    return false;
  };
  await(is_back, "the place is used again");
  for (const auto& used : {next, last}) per_process<Heap>().release(used.data());
}

void damaged_addresses_are_refused() {
  const std::span<std::byte> block = allocate(64);
  WindowMemory memory(block, 1, WindowAccess::kRead);
  const std::string address = memory.address();
  for (const std::string& wrong :
       {std::string(), std::string("nobody 1 0 0 0 0 0"), address.substr(0, address.size() / 2),
        address.substr(0, address.rfind(' ')) + "999999999999999 1"}) {
    expect_error(ErrorKind::kTransport, [&] { open(wrong); });
  }
  expect_error(ErrorKind::kTransport, [&] {
    std::array<std::byte, 64> elsewhere;
    WindowMemory outside(elsewhere, 1, WindowAccess::kRead);
  });
  per_process<Heap>().release(block.data());
}

void many_open_at_once() {
  const std::span<std::byte> block = allocate(64);
  for (int i = 0; i < 20; ++i) {
    WindowMemory memory(block, 1, WindowAccess::kRead);
    publish_word(memory.view(), 0, 1);
    const std::string address = memory.address();
    run_threads(4, [&](int) {
      for (int turn = 0; turn < 5; ++turn) {
        const auto opened = open(address);
        check(wait_word(*opened, 0, 1, kPatience, "rank 1", [] {}), "the word");
      }
    });
  }
  per_process<Heap>().release(block.data());
}

// Every length, alignment and single error of a line.
void checksums_differ() {
  Random random(1);
  std::vector<std::byte> bytes(300);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.below(256));
  for (size_t length = 0; length < bytes.size(); ++length) {
    const uint64_t sum = cpu::checksum(bytes.data(), length);
    for (const size_t place : {0, 1, 7, 16}) {
      std::vector<std::byte> copy(length + 32);
      check_equal(cpu::copy_with_checksum(copy.data() + place, bytes.data(), length), sum, "sum");
      check(std::memcmp(copy.data() + place, bytes.data(), length) == 0, "the copy");
      check(copy[place + length] == std::byte{0}, "what lies behind it");
    }
    for (size_t i = 0; i < length; ++i) {
      bytes[i] ^= std::byte{1};
      check(cpu::checksum(bytes.data(), length) != sum, "the sum of a changed byte");
      bytes[i] ^= std::byte{1};
    }
  }
  const uint64_t sum = cpu::checksum(bytes.data(), 256);
  std::swap_ranges(bytes.begin(), bytes.begin() + 64, bytes.begin() + 128);
  check(cpu::checksum(bytes.data(), 256) != sum, "the sum of lines in another order");
  const std::vector<std::byte> zeroes(100);
  check(cpu::checksum(zeroes.data(), 10) != cpu::checksum(zeroes.data(), 11), "lengths");
}

const CaseTable kCases{
    {"window_memory_closed", closed_window_is_seen_and_not_opened},
    {"window_memory_place", place_is_used_again_once_nobody_maps_it},
    {"window_memory_damaged", damaged_addresses_are_refused},
    {"window_memory_many", many_open_at_once},
    {"checksum_differs", checksums_differ},
};

}  // namespace
}  // namespace rota::test
