// Ranks on several hosts: every collective on uneven layouts, messages beside collectives, and
// failures of ranks and hosts. In most flavours chunks are so short that a call has many.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "host_ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;

// As tensor/hosts/ plans a call that asks for no wire format.
Call over_hosts(Call call, bool asks_for_wire) {
  call.algorithm = schedule::Algorithm::kTwoShot;
  if (row_of(call.kind).reduces && !asks_for_wire) call.wire = {info(call.dtype).accumulate};
  return call;
}

void call_over_hosts(HostRank& rank, TestCall call, uint64_t seed) {
  call.algorithm.reset();
  call.hop.reset();
  call_and_check({rank.rank(), rank.bridge.world_size(),
                  [&](const Call& planned, const cpu::Buffers& buffers) {
                    rank.run(over_hosts(planned, call.wire.has_value()), buffers);
                  }},
                 call, seed);
}

void mixed_calls(std::string_view letters, uint64_t num_calls) {
  run_on_hosts(letters, [&](HostRank& rank) {
    Random same_on_all_ranks(letters.size());
    Random own(3000 + rank.rank());
    for (uint64_t i = 0; i < num_calls; ++i) {
      const TestCall call = random_call(same_on_all_ranks, rank.bridge.world_size());
      dawdle(own);
      call_over_hosts(rank, call, i);
    }
  });
}

void long_calls(std::string_view letters, CollectiveKind kind, std::optional<DType> wire) {
  run_on_hosts(letters, [&](HostRank& rank) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      call_over_hosts(
          rank,
          {.kind = kind,
           .num_elems = 24000 + seed,
           .op = kind == CollectiveKind::kReduceBucket ? ReduceOp::kAvg : ReduceOp::kSum,
           .wire = wire},
          seed);
    }
  });
}

void short_sums(std::string_view letters) {
  run_on_hosts(letters, [&](HostRank& rank) {
    Random own(rank.rank());
    for (uint64_t seed = 0; seed < 60; ++seed) {
      dawdle(own);
      call_over_hosts(rank, {.num_elems = seed}, seed);
    }
  });
}

// A caller may write to its tensors as soon as the call returns, while other ranks still work.
void tensor_is_free_after_call(CollectiveKind kind) {
  run_on_hosts("abbc", [&](HostRank& rank) {
    std::vector<float> tensor(5000), gathered(4 * tensor.size());
    const cpu::Part input{tensor.data(), tensor.size()};
    std::vector<cpu::Part> outputs;
    for (size_t i = 0; i < 4; ++i) {
      outputs.push_back({gathered.data() + i * tensor.size(), tensor.size()});
    }
    const Call call =
        over_hosts(Planner(4).collective(kind, DType::kFloat32, tensor.size()), false);
    for (int i = 0; i < 30; ++i) {
      rank.run(call, row_of(kind).is_in_place
                         ? cpu::Buffers{.data = tensor.data()}
                         : cpu::Buffers{.inputs = &input, .outputs = outputs.data()});
      std::ranges::fill(tensor, static_cast<float>(i));
      std::ranges::fill(gathered, static_cast<float>(i));
    }
  });
}

void mismatch_is_an_error_on_all_hosts() {
  run_on_hosts("aabb", [&](HostRank& rank) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      const TestCall call{.num_elems = rank.rank() >= 2 ? uint64_t{11} : uint64_t{10}};
      expect_error(ErrorKind::kMismatch, [&] { call_over_hosts(rank, call, seed); },
                   {"float32[10]", "float32[11]"});
      call_over_hosts(rank, {.num_elems = 10}, seed);
    }
  });
}

void abort_at_any_moment(int num_groups) {
  for (int group = 0; group < num_groups; ++group) {
    run_on_hosts("abbc", [&](HostRank& rank) {
      call_until_aborted(
          rank.rank(), 4, group, 20000, [&](const char* why) { rank.bridge.abort(why); },
          [&](const TestCall& call, uint64_t seed) { call_over_hosts(rank, call, seed); });
    });
  }
}

void silent_host_is_lost() {
  setenv("ROTA_HOST_SILENCE_MS", "700", 1);
  run_on_hosts("aab",
               [&](HostRank& rank) {
                 const Error error = expect_error(ErrorKind::kPeerFailed, [&] {
                   while (true) rank.barrier();
                 });
                 check_contains(error.what(), "has given no sign of life");
                 if (rank.rank() < 2) check_contains(error.what(), "rank 2 on host 1");
               },
               {.cut_off = 2});
}

// As a device engine's: the bridge does not know of them.
void hook_ends_other_waits() {
  run_on_hosts("abbc", [](HostRank& rank) {
    std::atomic<bool> is_over{false};
    rank.bridge.on_failure([&] { is_over = true; });
    try {
      rank.barrier();
      if (rank.rank() == 1) rank.bridge.abort("no GPU");
    } catch (const Error&) {  // it was not the last to leave
    }
    while (!is_over) usleep(1000);
    rank.bridge.on_failure(nullptr);
    rank.bridge.await_failure(std::chrono::hours(1));  // has happened
    try {
      rank.bridge.check_usable("all_reduce");
      fail("a failed group is usable");
    } catch (const Error& error) {
      check_contains(error.what(), "no GPU");
    }
  });
}

// ---- messages beside collectives, as tensor/hosts/remote_transfers.cpp sends them ----

struct Sending {
  hosts::Letter letter;
  std::vector<std::byte> bytes;
  hosts::Engine::Transfer sent_letter, data;
};

std::byte byte_of(uint64_t number, size_t index) {
  return static_cast<std::byte>(mix(number * 1000 + index));
}

// Message `number`, with its number as tag.
void begin_send(HostRank& rank, Sending& sending, int peer, uint64_t number, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) sending.bytes.push_back(byte_of(number, i));
  sending.letter = {.kind = hosts::Letter::Kind::kEnvelope,
                    .envelope = {.tag = static_cast<int64_t>(number),
                                 .dtype = static_cast<uint64_t>(DType::kUInt8),
                                 .num_elems = num_bytes,
                                 .data_tag = hosts::kFirstDataTag + static_cast<int64_t>(number)}};
  sending.sent_letter =
      rank.bridge.send(&sending.letter, sizeof(hosts::Letter), peer, hosts::kLetterTag);
  sending.data = rank.bridge.send(sending.bytes.data(), num_bytes, peer,
                                  static_cast<int>(sending.letter.envelope.data_tag));
}

void recv_and_check(HostRank& rank, int source, uint64_t number) {
  const auto ended = std::make_shared<std::promise<void>>();
  const auto place = std::make_shared<hosts::Inbox::Place>(
      hosts::Inbox::Place{.source = source,
                          .tag = static_cast<int64_t>(number),
                          .deadline = hosts::Inbox::Clock::now() + kPatience,
                          .on_end = [ended] { ended->set_value(); }});
  rank.bridge.inbox().enter(place);
  ended->get_future().wait();
  std::optional<hosts::Inbox::Arrival>& arrival = place->arrival;
  check(arrival.has_value(), "a message came");
  const size_t num_bytes = arrival->envelope.num_bytes();
  std::vector<std::byte> bytes(num_bytes);
  if (arrival->early) {
    rank.bridge.wait_outside(arrival->early->transfer, "recv");
    bytes = arrival->early->bytes;
  } else {
    auto data = rank.bridge.recv(bytes.data(), num_bytes, arrival->source,
                                 static_cast<int>(arrival->envelope.data_tag));
    rank.bridge.wait_outside(data, "recv");
  }
  for (size_t i = 0; i < num_bytes; ++i) {
    check(bytes[i] == byte_of(number, i), "a byte of a message");
  }
}

// Both ranks send first, then receive in several threads, while collectives go on.
void messages_beside_collectives() {
  constexpr uint64_t kNumMessages = 24;
  run_on_hosts("ab", [](HostRank& rank) {
    std::vector<Sending> sendings(kNumMessages);
    for (uint64_t i = 0; i < kNumMessages; ++i) {
      begin_send(rank, sendings[i], 1 - rank.rank(), i, 100 * i);
    }
    run_threads(3, [&](int thread) {
      if (thread == 2) {
        for (uint64_t seed = 0; seed < 10; ++seed) call_over_hosts(rank, {.num_elems = 500}, seed);
        return;
      }
      for (uint64_t i = 0; i < kNumMessages / 2; ++i) {
        const int source = i % 3 == 0 ? kAnyRank : 1 - rank.rank();
        recv_and_check(rank, source, 2 * i + static_cast<uint64_t>(thread));
      }
    });
    for (Sending& sending : sendings) {
      rank.bridge.wait_outside(sending.sent_letter, "send");
      rank.bridge.wait_outside(sending.data, "send");
    }
  });
}

const CaseTable kCases{
    {"hosts_mixed_calls-2x2", mixed_calls, "aabb", 150},
    {"hosts_mixed_calls-uneven", mixed_calls, "aaab", 80},
    {"hosts_mixed_calls-three", mixed_calls, "abbc", 80},
    {"hosts_mixed_calls-interleaved", mixed_calls, "abab", 80},
    {"hosts_mixed_calls-1x1", mixed_calls, "ab", 150},
    {"hosts_long_sums", long_calls, "aabb", CollectiveKind::kAllReduce, std::nullopt},
    {"hosts_long_sums-float16", long_calls, "aabb", CollectiveKind::kAllReduce, DType::kFloat16},
    {"hosts_long_buckets", long_calls, "abbc", CollectiveKind::kReduceBucket, DType::kBFloat16},
    {"hosts_long_reduce_scatters", long_calls, "abbc", CollectiveKind::kReduceScatter,
     std::nullopt},
    {"hosts_long_all_gathers", long_calls, "abbc", CollectiveKind::kAllGather, std::nullopt},
    {"hosts_long_broadcasts", long_calls, "abbc", CollectiveKind::kBroadcast, std::nullopt},
    {"hosts_long_all_to_alls", long_calls, "aabb", CollectiveKind::kAllToAll, std::nullopt},
    {"hosts_short_sums", short_sums, "abbc"},
    {"hosts_free_tensor-all_reduce", tensor_is_free_after_call, CollectiveKind::kAllReduce},
    {"hosts_free_tensor-all_gather", tensor_is_free_after_call, CollectiveKind::kAllGather},
    {"hosts_mismatch-whole_host", mismatch_is_an_error_on_all_hosts},
    {"hosts_abort", abort_at_any_moment, 20},
    {"hosts_silent-from_the_start", silent_host_is_lost},
    {"hosts_hook", hook_ends_other_waits},
    {"hosts_messages", messages_beside_collectives},
};

}  // namespace
}  // namespace rota::test
