#include "cpu/executor.h"

namespace rota::cpu {

// Each is defined in the file of its collective.
extern const Executor& all_reduce_executor;  // also reduce_bucket and reduce
extern const Executor& reduce_shards_executor;
extern const Executor& update_shards_executor;
extern const Executor& reduce_scatter_executor;
extern const Executor& broadcast_executor;
extern const Executor& all_gather_executor;
extern const Executor& encoded_all_gather_executor;
extern const Executor& gather_executor;
extern const Executor& scatter_executor;
extern const Executor& all_to_all_executor;

namespace {

// A barrier is complete once every rank has posted.
class Barrier final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call&, const Buffers&, int, uint64_t) const override {
    return 0;
  }
  void contribute(const Call&, const Buffers&, const Mailboxes&) const override {}
  uint64_t complete(const Call&, const Buffers&, const Mailboxes&, Exchange&) const override {
    return 0;
  }
  uint64_t run_rounds(const Call&, const Buffers&, Exchange&) const override { return 0; }
};

}  // namespace

const Executor& executor_of(const Call& call) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceBucket:
    case CollectiveKind::kReduce:
      return all_reduce_executor;
    case CollectiveKind::kReduceShards:
      return reduce_shards_executor;
    case CollectiveKind::kUpdateShards:
      return update_shards_executor;
    case CollectiveKind::kReduceScatter:
      return reduce_scatter_executor;
    case CollectiveKind::kBroadcast:
      return broadcast_executor;
    case CollectiveKind::kAllGather:
      return call.encodes_parts() ? encoded_all_gather_executor : all_gather_executor;
    case CollectiveKind::kGather:
      return gather_executor;
    case CollectiveKind::kScatter:
      return scatter_executor;
    case CollectiveKind::kAllToAll:
      return all_to_all_executor;
    case CollectiveKind::kSendRecv:
    case CollectiveKind::kBarrier:
      break;
  }
  static constexpr Barrier kBarrier;
  return kBarrier;
}

}  // namespace rota::cpu
