// The cells of one link, with both of its ranks in one thread: which cell a chunk goes to, that
// none is lost or used twice, and what becomes of a post that no rank writes.
#include "transport/links.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <vector>

#include "check.h"
#include "random.h"
#include "transport/thread_transport.h"

namespace rota::test {
namespace {

using transport::Links;
using transport::Transport;

constexpr transport::Geometry kCells{
    .message_bytes = 1024, .slot_bytes = 4096, .num_cells = 16, .cell_bytes = 512};

class Side {
 public:
  explicit Side(Transport& transport)
      : peer_(1 - transport.rank()),
        waiter_(&transport.own_control().sleeping_on_links,
                transport.peers_flags(&transport::ControlBlock::sleeping_on_links)),
        links_(transport, waiter_) {}

  std::optional<Links::Room> room() { return links_.outgoing(peer_); }
  // Returns where it lies.
  const std::byte* send(uint64_t number, size_t num_bytes, bool is_end_of_message = true) {
    const auto room = links_.outgoing(peer_);
    std::memset(room->bytes.data(), static_cast<int>(number % 251), num_bytes);
    links_.publish(peer_, {number, num_bytes, 0}, num_bytes, is_end_of_message);
    return room->bytes.data();
  }
  std::optional<Links::Chunk> incoming() { return links_.incoming(peer_); }
  // Returns where it lay.
  const std::byte* recv(uint64_t number) {
    const auto chunk = links_.incoming(peer_);
    check(chunk.has_value(), "a chunk is there");
    check_equal(chunk->header[0], number, "its number");
    check_equal(chunk->header[1], chunk->bytes.size(), "its length");
    const auto byte = static_cast<std::byte>(number % 251);
    check(std::ranges::all_of(chunk->bytes, [&](std::byte other) { return other == byte; }),
          "nobody has written to it since");
    links_.release(peer_);
    return chunk->bytes.data();
  }

 private:
  int peer_;
  Waiter waiter_;
  Links links_;
};

struct Pair {
  std::vector<std::unique_ptr<Transport>> transports =
      transport::ThreadTransport::make_world(2, kCells);
  Side sides[2]{Side(*transports[0]), Side(*transports[1])};
};

void an_answer_lies_where_the_question_was() {
  Pair pair;
  const std::byte* place = pair.sides[0].send(0, 100);
  check(!pair.sides[0].room()->is_read, "the next cell has not been used");
  check_equal(pair.sides[1].recv(0), place, "the question's place");
  for (uint64_t number = 1; number < 1000; ++number) {
    Side& sender = pair.sides[number % 2];
    check(sender.room()->is_read, "the cell was read last");
    check_equal(sender.send(number, 100), place, "the answer's place");
    check_equal(pair.sides[1 - number % 2].recv(number), place, "the answer's place");
  }
}

void chunks_of_a_message_lie_behind_each_other() {
  Pair pair;
  const std::byte* place = pair.sides[0].send(0, 65, /*is_end_of_message=*/false);
  check_equal(pair.sides[0].send(1, 64, /*is_end_of_message=*/false), place + 128, "the second");
  pair.sides[1].send(0, 64);
  pair.sides[0].recv(0);  // brings a cell that is to be used next, but not for this message
  check_equal(pair.sides[0].send(2, 64), place + 192, "the third");
  check(pair.sides[0].send(3, 64) != place + 256, "another message, another cell");
  for (uint64_t number = 0; number < 4; ++number) pair.sides[1].recv(number);
}

void one_direction_goes_through_all_cells() {
  Pair pair;
  std::deque<const std::byte*> last;
  for (uint64_t number = 0; number < 1000; ++number) {
    pair.sides[0].incoming();  // takes in what was given back
    last.push_back(pair.sides[0].send(number, 64));
    pair.sides[1].recv(number);
    if (last.size() > kCells.num_cells) last.pop_front();
    const std::set<const std::byte*> places(last.begin(), last.end());
    // A cell is used again only after all that were given back before it.
    check(places.size() >= std::min(last.size(), kCells.num_cells / 2), "different cells");
  }
}

// Each rank may have any number of cells, and reads late or early.
void cells_are_neither_lost_nor_used_twice() {
  Pair pair;
  Random random(5);
  std::deque<uint64_t> under_way[2];
  uint64_t number = 0;
  for (int step = 0; step < 200000; ++step) {
    // One of them sends more, by turns.
    const uint64_t rank = random.below(8) < 6 ? step / 1000 % 2 : random.below(2);
    Side& side = pair.sides[rank];
    if (random.below(2) == 0) {
      side.incoming();  // takes in what was given back
      const auto room = side.room();
      if (!room) continue;
      const size_t num_bytes = std::min<size_t>(room->bytes.size(), 64 + random.below(3 * 64));
      const bool is_end = random.below(3) == 0;
      side.send(number, is_end ? num_bytes : std::max<size_t>(num_bytes / 64 * 64, 64), is_end);
      under_way[rank].push_back(number++);
    } else if (std::deque<uint64_t>& sent = under_way[1 - rank]; !sent.empty()) {
      side.recv(sent.front());
      sent.pop_front();
    }
  }
  for (const uint64_t rank : {0, 1}) {
    for (const uint64_t last : under_way[rank]) pair.sides[1 - rank].recv(last);
  }
  for (Side& side : pair.sides) check(!side.incoming(), "all has been read");
  size_t num_free = 0;
  for (Side& side : pair.sides) {
    while (side.room()) {
      side.send(number, 64);
      ++num_free;
    }
  }
  check_equal(num_free, 2 * kCells.num_cells, "cells");
}

void a_damaged_post_is_an_error() {
  const auto expect = [](size_t word, uint64_t value) {
    Pair pair;
    pair.sides[0].send(0, 64);
    const size_t offset = kCells.posts(1).offset;
    reinterpret_cast<Flag*>(pair.transports[0]->own().at(offset))->payload[word] = value;
    expect_error(ErrorKind::kInternal, [&] { pair.sides[1].incoming(); },
                 {"a post of rank 0 is damaged"});
  };
  constexpr uint64_t kCell = uint64_t{1} << 32;
  expect(6, 64 + 2 * kCells.num_cells * kCell);  // a cell that there is not
  expect(6, kCells.cell_bytes + 64);             // more bytes than a cell has
  expect(5, uint64_t{12} << 48);                 // more cells given back than fit
  expect(5, uint64_t{1} << 48);                  // one, of the wrong rank
}

const CaseTable kCases{
    {"links_answers", an_answer_lies_where_the_question_was},
    {"links_chunks", chunks_of_a_message_lie_behind_each_other},
    {"links_one_direction", one_direction_goes_through_all_cells},
    {"links_cells", cells_are_neither_lost_nor_used_twice},
    {"links_damaged", a_damaged_post_is_an_error},
};

}  // namespace
}  // namespace rota::test
