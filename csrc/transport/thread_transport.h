// Ranks as threads of one process, over plain memory. Layout, flags and executors are the same as
// between processes, but ThreadSanitizer can see every access.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace rota::transport {

class ThreadTransport final : public Transport {
 public:
  // One transport for each rank; together they own the shared memory.
  static std::vector<std::unique_ptr<Transport>> make_world(int world_size,
                                                            const Geometry& geometry);

  void reserve(const Span&) override {}  // allocated in full from the start
  std::span<const std::byte> heap_of(int) const override;
  std::string describe(int peer) const override;
  const LifeWord* life_of(int) const override { return nullptr; }
  CoreWord* own_core() const override { return nullptr; }
  std::vector<int> find_ended_peers() const override { return {}; }

 private:
  const CoreWord* core_of(int) const override { return nullptr; }

  using World = std::vector<std::shared_ptr<std::byte>>;  // by rank
  ThreadTransport(int rank, const Geometry& geometry, const World& world);

  World world_;
};

}  // namespace rota::transport
