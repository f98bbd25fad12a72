// The layout of a region: every part is inside it, on cache lines and disjoint.
#include "check.h"
#include "transport/layout.h"

namespace rota::test {
namespace {

using transport::ControlBlock;
using transport::Geometry;

constexpr Geometry kGeometries[] = {
    {.message_bytes = 1024, .slot_bytes = 4096, .num_cells = 6},
    {.message_bytes = 64 << 10, .slot_bytes = 256 << 10, .num_cells = 32}};

void messages_lie_in_the_mailbox_of_their_epoch() {
  for (const Geometry& geometry : kGeometries) {
    const size_t begin = sizeof(ControlBlock), end = geometry.slot(0);
    const size_t middle = begin + (end - begin) / 2;
    for (size_t num_bytes = 0; num_bytes <= geometry.message_bytes; ++num_bytes) {
      // Enough epochs to reach each of a few hundred places.
      for (uint64_t epoch = 0; epoch < (num_bytes % 64 == 0 ? 400 : 8); ++epoch) {
        const size_t place = geometry.message(epoch, num_bytes);
        const bool is_even = epoch % 2 == 0;
        check(place >= (is_even ? begin : middle), "a message begins in its mailbox");
        check(place + num_bytes <= (is_even ? middle : end), "a message ends in its mailbox");
        check_equal(place % kCacheLineBytes, 0, "offset in a cache line");
      }
    }
  }
}

void slots_and_links_lie_behind_each_other() {
  constexpr int kWorldSize = 3;
  for (const Geometry& geometry : kGeometries) {
    size_t end = geometry.slot(0);
    check_equal(end % kCacheLineBytes, 0, "offset in a cache line");
    for (uint64_t index = 0; index < transport::kNumCopySlots; ++index) {
      check_equal(geometry.slot(index), end, "slot");
      end += geometry.slot_bytes;
    }
    const transport::Span collectives = geometry.collectives(transport::kNumCopySlots);
    check_equal(collectives.offset + collectives.num_bytes, end, "end of the slots");
    for (int receiver = 0; receiver < kWorldSize; ++receiver) {
      const transport::Span posts = geometry.posts(receiver);
      check_equal(posts.offset, end, "begin of the posts");
      end += posts.num_bytes;
      check_equal(geometry.cells(receiver, 0, geometry.num_cells).offset, end,
                  "begin of the cells");
      for (size_t number = 0; number < geometry.num_cells; ++number) {
        check_equal(geometry.cell(receiver, number) % kCacheLineBytes, 0, "offset in a cache line");
        check(geometry.cell(receiver, number) >= end, "a cell begins behind the one before");
        end = geometry.cell(receiver, number) + geometry.cell_bytes;
      }
      const transport::Span last =
          geometry.cells(receiver, geometry.num_cells - 1, geometry.num_cells);
      check(last.offset + last.num_bytes >= end, "the last cell is inside the link");
      end = last.offset + last.num_bytes;
    }
    check_equal(geometry.num_bytes(kWorldSize), end, "bytes of a region");
  }
}

void up_to_eight_ranks_share_at_most_64_mib() {
  for (int world_size = 2; world_size <= 8; ++world_size) {
    const Geometry geometry{.message_bytes = 64 << 10,
                            .slot_bytes = 256 << 10,
                            .num_cells = transport::default_num_cells(world_size)};
    // A rank has no link to itself.
    const size_t num_bytes = static_cast<size_t>(world_size) * geometry.num_bytes(world_size - 1);
    check(num_bytes <= 64 << 20, join(world_size, " ranks share ", num_bytes, " bytes"));
  }
}

void control_block_has_pages_of_its_own() {
  check_equal(sizeof(ControlBlock) % transport::kPageBytes, 0, "bytes beyond a page");
  check_equal(alignof(ControlBlock) % transport::kPageBytes, 0, "alignment to pages");
}

const CaseTable kCases{
    {"layout_messages", messages_lie_in_the_mailbox_of_their_epoch},
    {"layout_slots_and_links", slots_and_links_lie_behind_each_other},
    {"layout_control_block", control_block_has_pages_of_its_own},
    {"layout_memory", up_to_eight_ranks_share_at_most_64_mib},
};

}  // namespace
}  // namespace rota::test
