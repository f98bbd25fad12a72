#include "transport/thread_transport.h"

#include <cstring>
#include <new>

#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {
namespace {

constexpr std::align_val_t kRegionAlignment{kPageBytes};

}  // namespace

// One rank's memory, zeroed: every sync word starts at rest.
struct ThreadTransport::Memory {
  explicit Memory(size_t num_bytes)
      : base(static_cast<std::byte*>(::operator new(num_bytes, kRegionAlignment))) {
    std::memset(base, 0, num_bytes);
  }
  ~Memory() { ::operator delete(base, kRegionAlignment); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* base;
};

ThreadTransport::ThreadTransport(int rank, const Geometry& geometry, const World& world)
    : Transport(rank, geometry,
                [&] {
                  std::vector<Region> regions;
                  for (const auto& memory : world) regions.emplace_back(memory->base, geometry);
                  return regions;
                }()),
      world_(world) {}

std::vector<std::unique_ptr<Transport>> ThreadTransport::make_world(int world_size,
                                                                    const Geometry& geometry) {
  World world;
  for (int rank = 0; rank < world_size; ++rank) {
    world.push_back(std::make_shared<Memory>(geometry.num_bytes(world_size)));
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
