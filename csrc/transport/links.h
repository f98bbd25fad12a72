// One rank's links to its peers, in the verbs of cuda/links.h. A link carries messages in the order
// in which they are sent, in pieces. A piece lies in a cell, a place of fixed length in the memory
// of one of the two ranks, which a post tells to the other.
//
//   sender    has_room(peer) ... write outgoing(peer) ... publish(peer, header, n)
//   receiver  incoming(peer), once to_read(peer) is there ... read it ... release(peer)
//
// A cell goes from rank to rank with what lies in it. Its reader keeps it, and writes the next
// piece that it sends to that peer there: such a line moves with its ownership, once, where a
// sender that writes it again would wait until the reader's copy is given up, which is slow on
// processors whose cores share no cache, and slower on the others, too (benchmarks/LOG.md). So an
// exchange to and fro runs in few cells that stay in the caches. Of those that are not needed for
// that, the reader gives back the oldest, and the sender takes those last: messages in one
// direction go through all cells, which are longer than a second-level cache, so that both sides
// find lines in the third level.
//
// Each rank has as many cells as the other at first, so it always gets room again: the peer keeps
// some, and each post that it reads beyond gives others back. And there are as many places for
// posts as cells of both: each post takes a cell along, so that one of those in between was back
// here before a place is written again, and what gave it back was posted after the first was read.
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
#include "transport/transport.h"

namespace rota::transport {

class Links {
 public:
  // Goes beside each piece.
  using Header = std::array<uint64_t, 3>;
  struct Piece {
    Header header;
    std::span<const std::byte> bytes;
  };

  // waiter must use the sleep flag sleeping_on_links.
  Links(Transport& transport, Waiter& waiter)
      : transport_(transport),
        geometry_(transport.geometry()),
        waiter_(waiter),
        links_(static_cast<size_t>(transport.world_size())) {
    for (int peer = 0; peer < transport.world_size(); ++peer) {
      std::vector<CellNumber>& cells = link_to(peer).own_cells;
      for (size_t i = geometry_.num_cells; i-- > 0;) cells.push_back(first_own_cell(peer) + i);
    }
  }

  // Whether a cell is free. Otherwise one may be once to_read(peer) is there and has been read.
  bool has_room(int peer) const {
    return !link_to(peer).own_cells.empty() || !link_to(peer).peers_cells.empty();
  }
  // Where the next piece goes, of up to cell_bytes. Throws Error(kTransport) if memory is short.
  std::byte* outgoing(int peer) {
    open(peer);
    const CellNumber cell = next_cell(peer);
    if (is_own(peer, cell)) reserve(peer, cell - first_own_cell(peer));
    return place(peer, cell);
  }
  void publish(int peer, const Header& header, uint64_t num_bytes) {
    Link& link = link_to(peer);
    post(
        peer,
        {.header = header, .num_bytes = static_cast<uint32_t>(num_bytes), .cell = next_cell(peer)});
    (link.peers_cells.empty() ? link.own_cells : link.peers_cells).pop_back();
  }

  // Holds once something has arrived.
  Awaited to_read(int peer) const {
    const Link& link = link_to(peer);
    if (!link.is_opened_by_peer) {
      return {&transport_.region(peer).control().link_opened[transport_.rank()], 1};
    }
    return {&flag_of(peer, transport_.rank(), link.num_read), link.num_read + 1};
  }
  // The next piece, if one has arrived; takes in what was given back before it. Throws
  // Error(kInternal) for what no peer posts.
  std::optional<Piece> incoming(int peer) {
    Link& link = link_to(peer);
    while (to_read(peer).is_there()) {
      if (!link.is_opened_by_peer) {
        link.is_opened_by_peer = true;
        continue;
      }
      const Post post = next_post(peer);
      if (post.num_returned == 0)
        return Piece{post.header, {place(peer, post.cell), post.num_bytes}};
      link.own_cells.insert(link.own_cells.begin(), post.returned.begin(),
                            post.returned.begin() + post.num_returned);
      ++link.num_read;
    }
    return std::nullopt;
  }
  // Ends the use of what incoming() has returned. Throws like outgoing().
  void release(int peer) {
    Link& link = link_to(peer);
    const CellNumber cell = next_post(peer).cell;
    ++link.num_read;
    if (is_own(peer, cell)) return link.own_cells.push_back(cell);
    link.peers_cells.push_back(cell);
    if (link.peers_cells.size() >= num_kept() + num_returned()) give_back(peer);
  }

 private:
  // Those of the lower rank come first.
  using CellNumber = uint16_t;
  // What a rank tells its peer, in the payload of a flag: a piece, or cells that are free.
  struct Post {
    Header header;
    std::array<CellNumber, 12> returned;
    uint32_t num_bytes;
    CellNumber cell;
    uint16_t num_returned;  // 0: it is a piece
  };
  using Payload = decltype(Flag::payload);
  static_assert(sizeof(Post) == sizeof(Payload));

  // To one peer, and from it.
  struct Link {
    bool is_opened = false;
    bool is_opened_by_peer = false;
    size_t num_reserved = 0;  // of the own cells
    uint64_t num_posted = 0;
    uint64_t num_read = 0;
    // The free ones; the last are taken first. Of the own ones, these came back with a message,
    // those in the middle were never used, the first were given back.
    std::vector<CellNumber> own_cells;
    std::vector<CellNumber> peers_cells;  // in the order in which they were read
  };

  Link& link_to(int peer) { return links_[static_cast<size_t>(peer)]; }
  const Link& link_to(int peer) const { return links_[static_cast<size_t>(peer)]; }

  // How many of the peer's cells a rank keeps, and how many more make it give as many back: a flag
  // has to move to its core and back for each time.
  size_t num_kept() const { return geometry_.num_cells / 2; }
  size_t num_returned() const {
    return std::clamp<size_t>(geometry_.num_cells / 8, 1, Post{}.returned.size());
  }
  void give_back(int peer) {
    open(peer);
    std::vector<CellNumber>& cells = link_to(peer).peers_cells;
    const auto end = cells.begin() + static_cast<std::ptrdiff_t>(num_returned());
    Post given{.num_returned = static_cast<uint16_t>(num_returned())};
    std::copy(cells.begin(), end, given.returned.begin());
    post(peer, given);
    cells.erase(cells.begin(), end);
  }

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
    Flag& flag = flag_of(transport_.rank(), peer, link.num_posted);
    flag.payload = std::bit_cast<Payload>(post);
    waiter_.publish(flag, ++link.num_posted);
  }
  // Checks the ranges, because the words come from another process.
  Post next_post(int peer) const {
    const auto post = std::bit_cast<Post>(to_read(peer).flag->payload);
    const bool is_sound = post.cell < 2 * geometry_.num_cells &&
                          post.num_bytes <= geometry_.cell_bytes &&
                          post.num_returned <= post.returned.size() &&
                          std::all_of(
                              post.returned.begin(), post.returned.begin() + post.num_returned,
                              [&](CellNumber cell) { return is_own(peer, cell); });
    if (is_sound) return post;
    throw Error(ErrorKind::kInternal, join("rota.recv: a post of rank ", transport_.number_of(peer),
                                           " is damaged; does another program write to its "
                                           "memory?"));
  }
  // Of a post by its number.
  Flag& flag_of(int sender, int receiver, uint64_t number) const {
    const size_t place = number % geometry_.num_posts();
    return *reinterpret_cast<Flag*>(
        transport_.region(sender).at(geometry_.posts(receiver).offset + place * sizeof(Flag)));
  }

  CellNumber first_own_cell(int peer) const {
    return static_cast<CellNumber>(transport_.rank() < peer ? 0 : geometry_.num_cells);
  }
  bool is_own(int peer, CellNumber cell) const {
    return cell >= first_own_cell(peer) && cell < first_own_cell(peer) + geometry_.num_cells;
  }
  CellNumber next_cell(int peer) const {
    const Link& link = link_to(peer);
    return link.peers_cells.empty() ? link.own_cells.back() : link.peers_cells.back();
  }
  std::byte* place(int peer, CellNumber cell) const {
    const int rank = transport_.rank();
    const size_t number = cell % geometry_.num_cells;
    return is_own(peer, cell) ? transport_.own().at(geometry_.cell(peer, number))
                              : transport_.region(peer).at(geometry_.cell(rank, number));
  }

  Transport& transport_;
  const Geometry& geometry_;
  Waiter& waiter_;
  std::vector<Link> links_;  // by peer
};

}  // namespace rota::transport
