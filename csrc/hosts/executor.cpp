#include "hosts/executor.h"

#include <cstring>

namespace rota::hosts {
namespace {

// In scratch memory; those below are hierarchical_sum()'s.
constexpr size_t kCopyOfOthers = 15;

// The root's sum takes the way of everybody's; the others' tensors stay as they are.
void reduce(Task task) {
  const Call& call = task.call;
  if (task.bridge.rank() != call.root && call.num_elems > 0) {
    std::byte* copy = task.scratch.at_least(kCopyOfOthers, call.num_bytes());
    task.buffers.data = std::memcpy(copy, task.buffers.data, call.num_bytes());
  }
  hierarchical_sum(task);
}

}  // namespace

void execute(const Task& task) {
  const auto run = [&](const auto& body) { task.bridge.run(task.call, task.own_timeout, body); };
  switch (task.call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceBucket:
      return hierarchical_sum(task);
    case CollectiveKind::kReduce:
      return reduce(task);
    case CollectiveKind::kReduceScatter:
      return run([&] { hierarchical_reduce_scatter(task); });
    case CollectiveKind::kBroadcast:
      return run([&] { hierarchical_broadcast(task); });
    case CollectiveKind::kAllGather:
      return run([&] { hierarchical_all_gather(task); });
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
      return run([&] { exchange_parts(task); });
    case CollectiveKind::kReduceShards:
    case CollectiveKind::kUpdateShards:
    case CollectiveKind::kSendRecv:
    case CollectiveKind::kBarrier:
      return run([] {});
  }
}

}  // namespace rota::hosts
