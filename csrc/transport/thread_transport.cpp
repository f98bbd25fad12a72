#include "transport/thread_transport.h"

#include <cstring>
#include <new>

#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {
namespace {

// One rank's memory, zeroed: every sync word starts at rest.
std::shared_ptr<std::byte> zeroed_region(size_t num_bytes) {
  constexpr std::align_val_t kAlignment{kPageBytes};
  void* memory = std::memset(::operator new(num_bytes, kAlignment), 0, num_bytes);
  return {static_cast<std::byte*>(memory),
          [](std::byte* base) { ::operator delete(base, kAlignment); }};
}

}  // namespace

ThreadTransport::ThreadTransport(int rank, const Geometry& geometry, const World& world)
    : Transport(rank, geometry,
                [&] {
                  std::vector<Region> regions;
                  for (const auto& memory : world) regions.emplace_back(memory.get(), geometry);
                  return regions;
                }()),
      world_(world) {}

std::vector<std::unique_ptr<Transport>> ThreadTransport::make_world(int world_size,
                                                                    const Geometry& geometry) {
  World world;
  for (int rank = 0; rank < world_size; ++rank) {
    world.push_back(zeroed_region(geometry.num_bytes(world_size)));
  }
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < world_size; ++rank) {
    transports.emplace_back(new ThreadTransport(rank, geometry, world));
  }
  return transports;
}

std::span<const std::byte> ThreadTransport::heap_of(int) const {
  return per_process<Heap>().contents();
}

std::string ThreadTransport::describe(int peer) const {
  return join("rank ", number_of(peer), " (a thread)");
}

}  // namespace rota::transport
