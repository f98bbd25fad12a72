// One rank's links to its peers, in the verbs of cuda/links.h. A link carries messages in the order
// in which they are sent, in chunks. A chunk lies in a cell, a place in the memory of one of the
// two ranks, behind the chunks of its message that are in there already. A post tells the peer
// where.
//
//   sender    outgoing(peer), once there is room ... write it ... publish(peer, header, n, end)
//   receiver  incoming(peer), once to_read(peer) is there ... read it ... release(peer)
//
// A cell goes from rank to rank with what lies in it. Its reader keeps it, and writes what it sends
// to that peer next there: such a line moves once, with its ownership, where a sender that writes
// it again would wait until the reader's copy is given up (benchmarks/LOG.md). So an exchange to
// and fro runs in few cells, which stay in the caches. The reader gives back the oldest of
// those that are not needed for that, and the sender takes them last: messages in one direction go
// through all cells, which together are longer than a second-level cache, so that both sides find
// lines in the third level.
//
// A rank that has no cell waits for the next post: its peer keeps a part of the cells only, and
// gives others back as it reads. There are places for the posts of all cells of both ranks and of
// one more. So of the posts since a place was last written one cell has been sent twice; the peer
// gave it back in between, after it had read the first of these posts, and so the place is free.
//
// Not safe for several threads at once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/waiter.h"
#include "schedule/chunk.h"
#include "transport/free_cells.h"
#include "transport/transport.h"

namespace rota::transport {

class Links {
 public:
  // Goes beside each chunk.
  using Header = std::array<uint64_t, 3>;
  struct Chunk {
    Header header;
    std::span<const std::byte> bytes;
  };
  struct Room {
    std::span<std::byte> bytes;
    bool is_read;  // this rank has read last what lies there
  };

  // waiter must use the sleep flag sleeping_on_links.
  Links(Transport& transport, Waiter& waiter)
      : transport_(transport), geometry_(transport.geometry()), waiter_(waiter) {
    for (int peer = 0; peer < transport.world_size(); ++peer) {
      links_.emplace_back(transport.rank() < peer, geometry_.num_cells);
    }
  }

  // Where the next chunk goes, if there is room. Otherwise there may be once to_read(peer) is there
  // and has been read. Throws Error(kTransport) if memory is short.
  std::optional<Room> outgoing(int peer) {
    open(peer);
    Link& link = link_to(peer);
    if (link.num_filled == 0) {
      if (link.free.is_empty()) return std::nullopt;
      link.filling = link.free.next();
    }
    const auto [cell, is_read] = link.filling;
    if (link.free.is_own(cell)) reserve(peer, cell % geometry_.num_cells);
    return Room{{place(peer, cell) + link.num_filled, geometry_.cell_bytes - link.num_filled},
                is_read};
  }
  // Chunks have at least a 16th of a cell, except where the message or the cell ends.
  void publish(int peer, const Header& header, uint64_t num_bytes, bool is_end_of_message) {
    Link& link = link_to(peer);
    if (link.num_filled == 0) link.free.take_next();
    link.num_filled += up_to_line(num_bytes);
    const bool is_end_of_cell = is_end_of_message || link.num_filled == geometry_.cell_bytes;
    post(peer, {.header = header,
                .returned = {},
                .num_bytes = static_cast<uint32_t>(num_bytes),
                .cell = link.filling.cell,
                .is_end_of_cell = is_end_of_cell});
    if (is_end_of_cell) link.num_filled = 0;
  }

  // Holds once something has arrived.
  Awaited to_read(int peer) const {
    const Link& link = link_to(peer);
    if (!link.is_opened_by_peer) {
      return {&transport_.region(peer).control().link_opened[transport_.rank()], 1};
    }
    return {&flag_of(peer, transport_.rank(), link.read), link.read.number + 1};
  }
  // The next chunk, if one has arrived; takes in what was given back before it. Throws
  // Error(kInternal) for what no peer posts.
  std::optional<Chunk> incoming(int peer) {
    Link& link = link_to(peer);
    while (to_read(peer).is_there()) {
      if (!link.is_opened_by_peer) {
        link.is_opened_by_peer = true;
        continue;
      }
      link.reading = next_post(peer);
      const auto& [header, returned, num_bytes, cell, is_end_of_cell] = link.reading;
      if (returned.num_cells == 0) {
        return Chunk{header, {place(peer, cell) + link.num_drained, num_bytes}};
      }
      link.free.add_returned({returned.cells.data(), returned.num_cells});
      advance(link.read);
    }
    return std::nullopt;
  }
  // Ends the use of what incoming() has returned. Throws like outgoing().
  void release(int peer) {
    Link& link = link_to(peer);
    advance(link.read);
    link.num_drained += up_to_line(link.reading.num_bytes);
    if (!link.reading.is_end_of_cell) return;
    link.num_drained = 0;
    link.free.add_read(link.reading.cell);
    if (!link.free.keeps_too_many()) return;
    open(peer);
    post(peer, {.header = {},
                .returned = link.free.take_returned(),
                .num_bytes = 0,
                .cell = 0,
                .is_end_of_cell = false});
  }

 private:
  // What a rank tells its peer, in the payload of a flag: a chunk, or cells that it gives back.
  struct Post {
    Header header;
    ReturnedCells returned;  // none: it is a chunk
    uint32_t num_bytes;
    CellNumber cell;
    uint16_t is_end_of_cell;
  };
  using Payload = decltype(Flag::payload);
  static_assert(sizeof(Post) == sizeof(Payload));

  // How many posts have been sent or read, and the place of the next one.
  struct Cursor {
    uint64_t number = 0;
    size_t place = 0;
  };

  // To one peer, and from it.
  struct Link {
    Link(bool is_lower_rank, size_t num_cells) : free(is_lower_rank, num_cells) {}

    FreeCells free;
    bool is_opened = false;
    bool is_opened_by_peer = false;
    size_t num_reserved = 0;  // of the own cells
    Cursor posted;
    FreeCells::Next filling{};  // the cell that is being written
    size_t num_filled = 0;      // bytes of it
    Cursor read;
    Post reading{};          // what incoming() has returned
    size_t num_drained = 0;  // bytes of the cell that is being read
  };

  Link& link_to(int peer) { return links_[static_cast<size_t>(peer)]; }
  const Link& link_to(int peer) const { return links_[static_cast<size_t>(peer)]; }

  void open(int peer) {
    if (link_to(peer).is_opened) return;
    transport_.reserve(geometry_.posts(peer));
    link_to(peer).is_opened = true;
    waiter_.publish(transport_.own_control().link_opened[peer], 1);
  }
  // The cells up to this one, and some more.
  void reserve(int peer, size_t own_cell) {
    size_t& num_reserved = link_to(peer).num_reserved;
    if (own_cell < num_reserved) return;
    const size_t num_cells =
        std::min(own_cell + std::max<size_t>(geometry_.num_cells / 16, 1), geometry_.num_cells);
    transport_.reserve(geometry_.cells(peer, num_reserved, num_cells));
    num_reserved = num_cells;
  }

  void post(int peer, const Post& post) {
    Link& link = link_to(peer);
    Flag& flag = flag_of(transport_.rank(), peer, link.posted);
    flag.payload = std::bit_cast<Payload>(post);
    advance(link.posted);
    waiter_.publish(flag, link.posted.number);
  }
  // Checks the ranges, because the words come from another process.
  Post next_post(int peer) const {
    const Link& link = link_to(peer);
    const auto post = std::bit_cast<Post>(to_read(peer).flag->payload);
    const auto& [returned, num_returned] = post.returned;
    const auto is_own = [&](CellNumber cell) { return link.free.is_own(cell); };
    if (post.cell < 2 * geometry_.num_cells && num_returned <= returned.size() &&
        post.num_bytes <= geometry_.cell_bytes - link.num_drained &&
        std::all_of(returned.begin(), returned.begin() + num_returned, is_own)) {
      return post;
    }
    throw Error(ErrorKind::kInternal,
                join("rota.recv: a post of rank ", transport_.number_of(peer),
                     " is damaged; does another program write to its memory?"));
  }
  void advance(Cursor& cursor) const {
    ++cursor.number;
    if (++cursor.place == geometry_.num_posts()) cursor.place = 0;
  }
  // The flag of the next post.
  Flag& flag_of(int sender, int receiver, const Cursor& cursor) const {
    const size_t offset = geometry_.posts(receiver).offset + cursor.place * sizeof(Flag);
    return *reinterpret_cast<Flag*>(transport_.region(sender).at(offset));
  }

  std::byte* place(int peer, CellNumber cell) const {
    const bool is_own = link_to(peer).free.is_own(cell);
    const size_t offset =
        geometry_.cell(is_own ? peer : transport_.rank(), cell % geometry_.num_cells);
    return is_own ? transport_.own().at(offset) : transport_.region(peer).at(offset);
  }
  // Chunks begin on cache lines.
  static size_t up_to_line(size_t num_bytes) {
    return schedule::ceil_div(num_bytes, kCacheLineBytes) * kCacheLineBytes;
  }

  Transport& transport_;
  const Geometry& geometry_;
  Waiter& waiter_;
  std::vector<Link> links_;  // by peer
};

}  // namespace rota::transport
