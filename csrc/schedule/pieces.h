// How a bucket of parameters is divided among the ranks that own and update them. A rank owns
// pieces of parameters. A piece begins at a leaf, a fixed block of elements that counts from the
// start of its parameter; so rounding, random numbers and sums of squares, which belong to tiles
// and leaves, depend neither on how many ranks there are nor on how parameters lie in buckets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/fixed_tree.h"
#include "base/random_bits.h"
#include "base/tile.h"
#include "schedule/chunk.h"

namespace rota::schedule {

inline constexpr uint64_t kLeafElems = kTreeGroup * kTileElems;

struct Piece {
  uint64_t begin;  // in elements of the bucket
  uint64_t num_elems;
  int owner;
  uint64_t first_tile;  // the number of its first tile among those of all parameters
};

// Each rank's pieces lie in a row, in the order of the bucket, each padded to whole tiles.
class Pieces {
 public:
  // A tile of a row. Only the last one of a piece is short.
  struct Tile {
    Range elems;      // in the bucket
    uint64_t offset;  // from the beginning of the range that is walked through
    uint64_t number;  // among the tiles of all parameters
    size_t piece;
    uint64_t place;  // in the piece
  };

  // pieces: in the order of the bucket; owners in [0, world_size).
  Pieces(std::vector<Piece> pieces, int world_size)
      : pieces_(std::move(pieces)), rows_(static_cast<size_t>(world_size)) {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      Row& row = rows_[static_cast<size_t>(piece.owner)];
      row.parts.push_back({row.num_elems, i});
      row.num_elems += padded(piece);
      longest_ = max_of(longest_, row.num_elems);
      num_elems_ += piece.num_elems;
      for (const uint64_t word :
           {piece.begin, piece.num_elems, static_cast<uint64_t>(piece.owner), piece.first_tile}) {
        digest_ = mix(digest_ ^ word);
      }
    }
  }

  const std::vector<Piece>& all() const { return pieces_; }
  uint64_t num_elems() const { return num_elems_; }
  uint64_t digest() const { return digest_; }
  uint64_t row_elems(int owner) const { return rows_[static_cast<size_t>(owner)].num_elems; }
  uint64_t longest_row() const { return longest_; }

  // range: of the owner's row, in whole tiles.
  template <typename Body>
  void for_each_tile(int owner, const Range& range, Body&& body) const {
    if (range.num_elems == 0) return;
    const std::vector<Part>& parts = rows_[static_cast<size_t>(owner)].parts;
    auto part = std::ranges::upper_bound(parts, range.begin, {}, &Part::begin) - 1;
    for (uint64_t offset = 0; offset < range.num_elems; offset += kTileElems) {
      const uint64_t at = range.begin + offset;
      while (at >= part->begin + padded(pieces_[part->piece])) ++part;
      const Piece& piece = pieces_[part->piece];
      const uint64_t place = at - part->begin;
      body(Tile{.elems = {piece.begin + place, min_of(kTileElems, piece.num_elems - place)},
                .offset = offset,
                .number = piece.first_tile + place / kTileElems,
                .piece = part->piece,
                .place = place});
    }
  }

 private:
  struct Part {
    uint64_t begin;  // in the row
    size_t piece;
  };
  struct Row {
    std::vector<Part> parts;
    uint64_t num_elems = 0;
  };

  static uint64_t padded(const Piece& piece) {
    return ceil_div(piece.num_elems, kTileElems) * kTileElems;
  }

  std::vector<Piece> pieces_;
  std::vector<Row> rows_;
  uint64_t longest_ = 0;
  uint64_t num_elems_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace rota::schedule
