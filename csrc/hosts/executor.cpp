#include "hosts/executor.h"

#include <cstring>

#include "hosts/exchange_parts.h"
#include "hosts/hierarchical_copies.h"
#include "hosts/hierarchical_sum.h"

namespace rota::hosts {
namespace {

// In scratch memory; those below are hierarchical_sum()'s.
constexpr size_t kCopyOfOthers = 15;

// The root's sum takes the way of everybody's; the others' tensors stay as they are.
void reduce(Bridge& bridge, Scratch& scratch, const Call& call, const LevelOrders& orders,
            const cpu::Buffers& buffers, std::optional<Nanoseconds> own_timeout) {
  cpu::Buffers copy = buffers;
  if (bridge.rank() != call.root && call.num_elems > 0) {
    std::byte* bytes = scratch.at_least(kCopyOfOthers, call.num_bytes());
    copy.data = std::memcpy(bytes, buffers.data, call.num_bytes());
  }
  hierarchical_sum(bridge, scratch, call, orders, copy, own_timeout);
}

}  // namespace

void execute(Bridge& bridge, Scratch& scratch, const Call& call, const LevelOrders& orders,
             const cpu::Buffers& buffers, std::optional<Nanoseconds> own_timeout) {
  const auto run = [&](const auto& body) { bridge.run(call, own_timeout, body); };
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceBucket:
      return hierarchical_sum(bridge, scratch, call, orders, buffers, own_timeout);
    case CollectiveKind::kReduce:
      return reduce(bridge, scratch, call, orders, buffers, own_timeout);
    case CollectiveKind::kReduceScatter:
      return run([&] { hierarchical_reduce_scatter(bridge, scratch, call, orders, buffers); });
    case CollectiveKind::kBroadcast:
      return run(
          [&] { hierarchical_broadcast(bridge, call, static_cast<std::byte*>(buffers.data)); });
    case CollectiveKind::kAllGather:
      return run([&] { hierarchical_all_gather(bridge, scratch, call, buffers); });
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
      return run([&] { exchange_parts(bridge, scratch, call, buffers); });
    case CollectiveKind::kSendRecv:
    case CollectiveKind::kBarrier:
      return run([] {});
  }
}

}  // namespace rota::hosts
