// The layout of a GPU's region: every part is on cache lines, inside the region and disjoint.
#include <algorithm>
#include <vector>

#include "check.h"
#include "transport/device_layout.h"

namespace rota::test {
namespace {

using transport::DeviceGeometry;
using transport::kDeviceLineBytes;

struct Place {
  size_t begin, end;
};

std::vector<Place> places_of(const DeviceGeometry& geometry) {
  std::vector<Place> places;
  const auto add = [&](size_t begin, size_t num_bytes) {
    places.push_back({begin, begin + num_bytes});
  };
  for (int channel = 0; channel < geometry.num_channels; ++channel) {
    add(geometry.channel_state(channel), sizeof(transport::ChannelState));
    for (int peer = 0; peer < geometry.world_size; ++peer) {
      add(geometry.link_end(channel, peer), sizeof(transport::LinkEnd));
      for (uint64_t i = 0; i < 2; ++i) {
        add(geometry.packet_header(channel, i, peer), kDeviceLineBytes);
        add(geometry.packets(channel, i, peer), geometry.packet_bytes);
      }
      for (uint64_t i = 0; i < transport::kNumLinkSlots; ++i) {
        add(geometry.slot(channel, peer, i), geometry.slot_bytes);
      }
    }
  }
  return places;
}

void places_fill_the_region(const DeviceGeometry& geometry) {
  std::vector<Place> places = places_of(geometry);
  std::ranges::sort(places, {}, &Place::begin);
  size_t end = 0;
  for (const Place& place : places) {
    check_equal(place.begin, end, "where a place begins");
    check_equal(place.begin % kDeviceLineBytes, 0, "offset in a cache line");
    end = place.end;
  }
  check_equal(geometry.num_bytes(), end, "bytes of a region");
}

void small_geometries() {
  for (int world_size = 1; world_size <= 8; ++world_size) {
    for (int num_channels = 1; num_channels <= 5; ++num_channels) {
      for (const size_t slot_bytes : {128, 256, 640}) {
        for (const size_t packet_bytes : {128, 384}) {
          places_fill_the_region({world_size, num_channels, slot_bytes, packet_bytes});
        }
      }
    }
  }
}

// Messages rotate through slots, and rounds through packet buffers.
void places_recur() {
  const DeviceGeometry geometry{4, 3, 256, 128};
  for (uint64_t i = 0; i < 100; ++i) {
    const uint64_t slot = i % transport::kNumLinkSlots;
    check_equal(geometry.slot(2, 3, i), geometry.slot(2, 3, slot), "slot");
    check_equal(geometry.packets(2, i, 3), geometry.packets(2, i % 2, 3), "packets");
  }
}

// Each word that another rank writes has its own cache line.
void flags_lie_on_lines_of_their_own() {
  using transport::LinkEnd;
  check_equal(sizeof(transport::DeviceFlag), kDeviceLineBytes, "bytes of a flag");
  check_equal(sizeof(LinkEnd), 3 * kDeviceLineBytes, "bytes of a link's end");
  check_equal(sizeof(transport::ChannelState), kDeviceLineBytes, "bytes of a channel's state");
}

const CaseTable kCases{
    {"kernel_layout_small_geometries", small_geometries},
    {"kernel_layout_recurs", places_recur},
    {"kernel_layout_flags", flags_lie_on_lines_of_their_own},
};

}  // namespace
}  // namespace rota::test
