// The cells of a link that one of its two ranks has and may write: of its own, and of its peer's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace rota::transport {

// The number of a cell among those of both ranks. Those of the lower rank come first.
using CellNumber = uint16_t;

// Cells that are given back to their owner at once.
struct ReturnedCells {
  std::array<CellNumber, 11> cells;
  uint16_t num_cells;
};

class FreeCells {
 public:
  // num_cells: of each rank.
  FreeCells(bool is_lower_rank, size_t num_cells)
      : first_own_(static_cast<CellNumber>(is_lower_rank ? 0 : num_cells)), num_own_(num_cells) {
    for (size_t i = num_cells; i-- > 0;) others_.push_back(static_cast<CellNumber>(first_own_ + i));
  }

  bool is_own(CellNumber cell) const { return cell >= first_own_ && cell < first_own_ + num_own_; }

  bool is_empty() const { return read_.empty() && others_.empty(); }
  struct Next {
    CellNumber cell;
    bool is_read;  // this rank has read it last
  };
  // The one that this rank has read last, if any.
  Next next() const {
    return read_.empty() ? Next{others_.back(), false} : Next{read_.back(), true};
  }
  void take_next() {
    if (read_.empty()) return others_.pop_back();
    if (!is_own(read_.back())) --num_kept_;
    read_.pop_back();
  }

  void add_read(CellNumber cell) {
    read_.push_back(cell);
    if (!is_own(cell)) ++num_kept_;
  }
  void add_returned(std::span<const CellNumber> cells) {
    others_.insert(others_.begin(), cells.begin(), cells.end());
  }

  // Whether a rank should give cells back. It keeps up to half of its peer's, and then gives back
  // several, because a post for each would cost more.
  bool keeps_too_many() const { return num_kept_ >= num_own_ / 2 + num_returned(); }
  // Takes out those that were read first.
  ReturnedCells take_returned() {
    ReturnedCells returned{};
    std::erase_if(read_, [&](CellNumber cell) {
      if (is_own(cell) || returned.num_cells == num_returned()) return false;
      returned.cells[returned.num_cells++] = cell;
      return true;
    });
    num_kept_ -= returned.num_cells;
    return returned;
  }

 private:
  size_t num_returned() const {
    return std::clamp<size_t>(num_own_ / 8, 1, ReturnedCells{}.cells.size());
  }

  CellNumber first_own_;
  size_t num_own_;
  std::vector<CellNumber> read_;    // in the order in which they were read
  std::vector<CellNumber> others_;  // own ones: those given back, then those never used
  size_t num_kept_ = 0;             // of the peer, among read_
};

}  // namespace rota::transport
