#include "kernel_calls.h"

#include <algorithm>
#include <mutex>

#include "base/random_bits.h"
#include "base/tile.h"
#include "calls.h"
#include "check.h"
#include "core/communicator.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "cpu/element_loops.h"
#include "numbers.h"
#include "reference.h"
#include "schedule/ring.h"

namespace rota::test {
namespace {

using schedule::Range;

bool moves_bytes(const KernelCall& call) {
  return call.kernel == Kernel::kBroadcast || call.kernel == Kernel::kTransfer;
}
bool moves_only(const KernelCall& call) {
  return call.kernel == Kernel::kAllGather || moves_bytes(call);
}
bool has_equal_shards(const KernelCall& call) {
  return call.kernel == Kernel::kReduceScatter || call.kernel == Kernel::kAllGather;
}
bool has_one_tensor(const KernelCall& call) {
  return call.is_in_place || call.kernel == Kernel::kTwoShotInPlace || moves_bytes(call);
}
bool has_partial_sums(const KernelCall& call) {
  return call.kernel == Kernel::kRing || call.kernel == Kernel::kOrderedRing ||
         call.kernel == Kernel::kHierarchical;
}

uint64_t granule_elems(const KernelCall& call) {
  return call.is_bucket ? kTileElems : kGranuleElems;
}

// For reduce_scatter and all_gather: the shard that one rank gets or contributes.
Range equal_shard(const KernelCall& call, int world_size, int rank) {
  return schedule::even_shard(call.num_elems, static_cast<uint64_t>(world_size),
                              static_cast<uint64_t>(rank), 1);
}

// The bits of elem_dtype(call) that a rank contributes.
uint64_t input_bits(const KernelCall& call, int world_size, int rank, uint64_t elem) {
  const uint64_t any = hash(call.seed, rank, elem);
  if (call.numbers == Numbers::kMixed) return mixed_bits(elem_dtype(call), any);
  const int64_t integer = exact_integer(call.format.dtype, call.op, world_size, any);
  return bits_of_integer(elem_dtype(call), integer);
}

// Convert between float32 and the wire format, as for buckets.
void encode_bucket(const KernelCall& call, int rank, const std::vector<float>& values,
                   std::byte* wire) {
  const cpu::WireLoops& loops = cpu::element_loops().wire(call.format);
  const WirePlace whole = call.format.place(wire, values.size());
  for (uint64_t begin = 0; begin < values.size(); begin += kTileElems) {
    const uint64_t num_elems = schedule::min_of(kTileElems, values.size() - begin);
    const WirePlace tile = call.format.from(whole, begin);
    if (call.stochastic_seed) {
      const uint32_t key =
          tile_key(*call.stochastic_seed, static_cast<uint64_t>(rank), begin / kTileElems);
      loops.encode_at_random(&values[begin], tile, num_elems, 1, key);
    } else {
      loops.encode(&values[begin], tile, num_elems, 1);
    }
  }
}
std::vector<float> decode_bucket(const KernelCall& call, std::byte* wire, uint64_t num_elems) {
  std::vector<float> values(num_elems);
  const WirePlace whole = call.format.place(wire, num_elems);
  cpu::element_loops().wire(call.format).decode_sum({&whole, 1}, values.data(), num_elems, 1);
  return values;
}

struct Pair {
  int sender, receiver;
};

// The pair of kTransfer that a rank belongs to; none if it has no part.
std::optional<Pair> pair_of(const KernelCall& call, int world_size, int rank) {
  if (rank == call.root || rank == call.receiver) return Pair{call.root, call.receiver};
  if (world_size < 4) return std::nullopt;
  std::vector<int> others;
  for (int other = 0; other < world_size; ++other) {
    if (other != call.root && other != call.receiver) others.push_back(other);
  }
  return Pair{others[0], others[1]};
}

cuda::Sums sums_of(const KernelCall& call) {
  const bool is_tree = call.is_tree && info(call.format.dtype).is_floating;
  return is_tree ? cuda::Sums::kInTree : cuda::Sums::kInGroups;
}

// Adds each group in the accumulate dtype, then the groups' sums, or along the tree, and rounds
// once.
uint64_t reduce_in_order(const KernelCall& call, std::vector<uint64_t> srcs, int first_rank) {
  const int world_size = static_cast<int>(srcs.size());
  const DType dtype = elem_dtype(call);
  const DType accumulate = info(dtype).accumulate;
  const bool is_narrow = accumulate != dtype;
  if (is_narrow) {
    for (uint64_t& bits : srcs) bits = round_to(accumulate, to_double(dtype, bits));
  }
  std::rotate(srcs.begin(), srcs.begin() + first_rank, srcs.end());
  const ReduceOp partial_op = call.op == ReduceOp::kAvg ? ReduceOp::kSum : call.op;
  const int group_size = call.group_size == 0 ? world_size : call.group_size;
  std::vector<uint64_t> groups;
  if (call.is_tree) groups.push_back(reduce_in_tree(accumulate, partial_op, srcs));
  for (int first = 0; first < world_size && !call.is_tree; first += group_size) {
    const auto group =
        std::span(srcs).subspan(static_cast<size_t>(first), static_cast<size_t>(group_size));
    groups.push_back(reduce_scalars(accumulate, partial_op, group, 1));
  }
  const uint64_t total = reduce_scalars(accumulate, call.op, groups, world_size);
  return is_narrow ? round_to(dtype, to_double(accumulate, total)) : total;
}

// A tensor's memory, exactly its size, so that AddressSanitizer catches any access beyond its end.
struct TensorBytes {
  std::vector<std::byte> bytes;
  size_t misalignment = 0;

  std::byte* data() { return bytes.data() + misalignment; }
};

// The launches of all ranks, and the check of their results.
class CheckedCalls {
 public:
  CheckedCalls(HostGrid& grid, const std::vector<CheckedCall>& calls) : grid_(grid) {
    for (const CheckedCall& checked : calls) {
      calls_.push_back({.call = &checked.call, .expected = checked.expected});
      Planned& planned = calls_.back();
      for (int rank = 0; rank < world_size(); ++rank) {
        Tensors& tensors = planned.ranks.emplace_back(make_tensors(checked.call, rank));
        planned.inputs.push_back(tensors.input_data());
        planned.outputs.push_back(tensors.output.data());
      }
    }
  }

  int num_blocks(int number) {
    const KernelCall& call = *at(number).call;
    if (call.num_elems == 0) return 0;
    if (call.kernel != Kernel::kLowLatency) return call.num_blocks;
    const uint64_t num_chunks =
        schedule::ceil_div(call.num_elems, chunk_elems(call, grid_.shape()));
    return static_cast<int>(num_chunks);
  }
  int late_rank(int number) { return at(number).call->late_rank; }
  void prepare(int rank, int number) {
    const KernelCall& call = *at(number).call;
    Tensors& tensors = at(number).of(rank);
    std::ranges::fill(tensors.output.bytes, std::byte{0xa5});
    std::vector<float> values;
    for (uint64_t i = 0; i < tensors.input_range.num_elems; ++i) {
      const uint64_t bits = input_bits(call, world_size(), rank, tensors.input_range.begin + i);
      if (call.is_bucket) {
        values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
      } else {
        store_bits(call.format.dtype, tensors.input_data(), i, bits);
      }
    }
    if (call.is_bucket) encode_bucket(call, rank, values, tensors.input_data());
    try {
      tensors.launch =
          launch_of(call, grid_.peers(rank), rank, at(number).inputs, at(number).outputs);
    } catch (const Error& error) {
      tensors.launch.has_part = false;
      tensors.refusal = error.what();
    }
  }
  void launch(const HostBlock& block, int rank, int number) {
    test::launch(block, grid_.peers(rank), at(number).of(rank).launch);
  }
  bool finish(int rank, int number) {
    try {
      const cuda::Failure failure = grid_.failure(rank);
      const std::string& refusal = at(number).of(rank).refusal;
      check(refusal.empty(), refusal);
      check(failure.kind == cuda::FailureKind::kNone, to_string(failure));
      check_result(rank, at(number));
      return true;
    } catch (const Failure& failure) {
      const std::lock_guard lock(mutex_);
      if (what_.empty()) {
        what_ = join("call ", number, ", rank ", rank, '/', world_size(), ", ",
                     at(number).call->to_string(), ": ", failure.what());
      }
      return false;
    }
  }
  const std::string& what() const { return what_; }

 private:
  struct Tensors {
    TensorBytes input, output;
    Range input_range, output_range;  // in the whole tensor
    bool is_one;
    KernelLaunch launch;
    std::string refusal;  // why the launch was refused

    std::byte* input_data() { return is_one ? output.data() : input.data(); }
  };
  struct Planned {
    const KernelCall* call;
    const std::vector<uint64_t>& expected;
    std::vector<Tensors> ranks;
    std::vector<std::byte*> inputs, outputs;

    Tensors& of(int rank) { return ranks[static_cast<size_t>(rank)]; }
  };

  int world_size() const { return grid_.shape().world_size; }
  Planned& at(int number) { return calls_[static_cast<size_t>(number)]; }

  Tensors make_tensors(const KernelCall& call, int rank) const {
    const Range whole{0, call.num_elems};
    const Range shard = equal_shard(call, world_size(), rank);
    Tensors tensors{.input_range = call.kernel == Kernel::kAllGather ? shard : whole,
                    .output_range = call.kernel == Kernel::kReduceScatter ? shard : whole,
                    .is_one = has_one_tensor(call)};
    const auto make = [&](const Range& range) {
      return TensorBytes{
          std::vector<std::byte>(call.misalignment + call.format.num_bytes(range.num_elems)),
          call.misalignment};
    };
    tensors.output = make(tensors.output_range);
    if (!tensors.is_one) tensors.input = make(tensors.input_range);
    return tensors;
  }

  void check_result(int rank, Planned& planned) {
    const KernelCall& call = *planned.call;
    Tensors& tensors = planned.of(rank);
    const int sender = pair_of(call, world_size(), rank).value_or(Pair{rank, rank}).sender;
    std::vector<float> values;
    if (call.is_bucket) {
      values = decode_bucket(call, tensors.output.data(), tensors.output_range.num_elems);
    }
    for (uint64_t i = 0; i < tensors.output_range.num_elems; ++i) {
      const uint64_t elem = tensors.output_range.begin + i;
      const uint64_t expected = call.kernel == Kernel::kTransfer
                                    ? input_bits(call, world_size(), sender, elem)
                                    : planned.expected[elem];
      const uint64_t got = call.is_bucket ? std::bit_cast<uint32_t>(values[i])
                                          : load_bits(call.format.dtype, tensors.output.data(), i);
      if (!is_same(elem_dtype(call), got, expected)) {
        fail(join("wrong number: element ", elem, " has bits ", got, ", expected ", expected));
      }
    }
  }

  HostGrid& grid_;
  std::vector<Planned> calls_;
  std::mutex mutex_;
  std::string what_;  // the first error
};

}  // namespace

std::string KernelCall::to_string() const {
  std::string text = join(cuda::name(kernel), '(', name(format.dtype),
                          format.is_block_scaled ? " in scaled blocks" : "", '[', num_elems, "], ",
                          name(op), ", ", num_blocks, " blocks");
  if (group_size != 0) text += join(", groups of ", group_size);
  if (is_tree) text += ", tree";
  if (stochastic_seed) text += join(", rounded at random from ", *stochastic_seed);
  if (misalignment != 0) text += join(", misaligned by ", misalignment);
  if (is_in_place) text += ", in place";
  return text + join(", root ", root, ", receiver ", receiver, ')');
}

std::string to_string(const cuda::Failure& failure) {
  if (failure.kind == cuda::FailureKind::kNone) return "no failure";
  constexpr std::array kPhases{"a message of", "a free slot of", "a packet of"};
  constexpr std::array kKinds{"no failure", "timeout", "aborted", "another launch", "stall"};
  return join(kKinds[static_cast<size_t>(failure.kind)], " awaiting ",
              kPhases[static_cast<size_t>(failure.phase)], " rank ", failure.peer, " in channel ",
              failure.channel);
}

bool is_defined(Kernel kernel, const WireFormat& format) {
  return kernel != Kernel::kLowLatency || !format.is_block_scaled;
}

KernelLaunch launch_of(const KernelCall& call, const cuda::Peers& peers, int rank,
                       const std::vector<std::byte*>& inputs,
                       const std::vector<std::byte*>& outputs) {
  KernelLaunch launch{.kernel = call.kernel, .format = call.format, .sums = sums_of(call)};
  std::ranges::copy(outputs, launch.tensors.of);
  std::optional<Pair> ends = Pair{call.root, call.receiver};
  if (call.kernel == Kernel::kTransfer) ends = pair_of(call, peers.world_size(), rank);
  launch.has_part = ends.has_value();
  if (!launch.has_part) return launch;
  cuda::LaunchRequest request{.kernel = launch.kernel,
                              .num_elems = call.num_elems,
                              .format = call.format,
                              .op = call.op,
                              .divisor = static_cast<double>(peers.world_size()),
                              .sums = launch.sums,
                              .group_size = call.group_size,
                              .is_bucket = call.is_bucket,
                              .rounding = {.is_stochastic = call.stochastic_seed.has_value(),
                                           .seed = call.stochastic_seed.value_or(0),
                                           .stream = kResultStream},
                              .source = ends->sender,
                              .destination = ends->receiver,
                              .fingerprint = mix(call.seed + call.num_elems)};
  const auto first = static_cast<size_t>(peers.first_rank);
  for (size_t place = 0; place < static_cast<size_t>(peers.num_local_ranks); ++place) {
    request.output[place] = outputs[first + place];
    request.input[place] = inputs[first + place];
  }
  if (call.kernel == Kernel::kTwoShotInPlace) request.tensors = &launch.tensors;
  if (moves_bytes(call)) {
    request.num_elems = call.format.num_bytes(call.num_elems);
    request.format = cuda::kBytes;
    request.moves_floats = info(call.format.dtype).is_floating;
  }
  launch.args = cuda::plan_launch(request, peers, schedule::kLocalTuning).args;
  return launch;
}

KernelCall varied(KernelCall call, int world_size, uint64_t variant) {
  call.seed = variant;
  call.num_blocks = 1 + static_cast<int>(variant % 2);
  call.is_in_place = variant % 3 == 0 && !has_equal_shards(call);
  const bool may_be_misaligned = !call.format.is_block_scaled;
  call.misalignment = variant % 4 == 1 && may_be_misaligned ? info(call.format.dtype).num_bytes : 0;
  call.root = static_cast<int>(variant % static_cast<uint64_t>(world_size));
  call.receiver = (call.root + 1) % world_size;
  return call;
}

DType elem_dtype(const KernelCall& call) {
  return call.is_bucket ? DType::kFloat32 : call.format.dtype;
}

uint64_t chunk_elems(const KernelCall& call, const GridShape& shape) {
  const uint64_t granule = granule_elems(call);
  // Half of a packet is flags.
  if (call.kernel == Kernel::kLowLatency) {
    return call.format.capacity(shape.packet_bytes / 2, granule);
  }
  const size_t room = call.kernel == Kernel::kOrderedRing ? shape.slot_bytes / 2 : shape.slot_bytes;
  const uint64_t capacity = call.format.capacity(room, granule);
  if (!has_partial_sums(call)) return capacity;
  const size_t partial_bytes = info(info(call.format.dtype).accumulate).num_bytes;
  return std::min(capacity, room / (partial_bytes * granule) * granule);
}

std::vector<uint64_t> edge_lengths(const KernelCall& call, const GridShape& shape) {
  const auto world_size = static_cast<uint64_t>(shape.world_size);
  const uint64_t unit =
      call.is_bucket ? 64 : cuda::kAccessBytes / info(call.format.dtype).num_bytes;
  const uint64_t chunk = chunk_elems(call, shape);
  std::vector<uint64_t> lengths{0, 1};
  for (const uint64_t edge : {world_size, unit, granule_elems(call), chunk, 3 * chunk,
                              world_size * chunk, 2 * world_size * chunk}) {
    lengths.insert(lengths.end(), {edge - 1, edge, edge + 1});
  }
  if (call.kernel == Kernel::kLowLatency) {
    std::erase_if(lengths, [&](uint64_t length) {
      return schedule::ceil_div(length, chunk) > static_cast<uint64_t>(shape.num_blocks);
    });
  }
  std::ranges::sort(lengths);
  lengths.erase(std::ranges::unique(lengths).begin(), lengths.end());
  // With equal shards, these are the lengths of one shard.
  if (has_equal_shards(call)) {
    for (uint64_t& length : lengths) length *= world_size;
  }
  return lengths;
}

std::vector<uint64_t> expected_bits(const KernelCall& call, int world_size) {
  std::vector<uint64_t> expected(call.num_elems), srcs(static_cast<size_t>(world_size));
  for (uint64_t elem = 0; elem < call.num_elems; ++elem) {
    const auto shard_with = [&](uint64_t granule) {
      const auto length = schedule::even_shard(call.num_elems, srcs.size(), 0, granule).num_elems;
      return static_cast<int>(elem / length);
    };
    if (moves_only(call)) {
      const int source = call.kernel == Kernel::kAllGather ? shard_with(1) : call.root;
      expected[elem] = input_bits(call, world_size, source, elem);
      continue;
    }
    for (int rank = 0; rank < world_size; ++rank) {
      srcs[static_cast<size_t>(rank)] = input_bits(call, world_size, rank, elem);
    }
    // schedule/ring.h: shard p's sum starts at rank p.
    const int first_rank = call.kernel == Kernel::kRing ? shard_with(granule_elems(call)) : 0;
    expected[elem] = reduce_in_order(call, srcs, first_rank);
  }
  return expected;
}

std::vector<std::vector<uint64_t>> cpu_bits(const std::vector<KernelCall>& calls, int world_size) {
  std::vector<std::vector<uint64_t>> results(calls.size());
  run_ranks(world_size, [&](Communicator& communicator) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const KernelCall& call = calls[i];
      const DType dtype = elem_dtype(call);
      const auto algorithm = call.kernel == Kernel::kRing ? schedule::Algorithm::kRing
                             : call.kernel == Kernel::kOrderedRing
                                 ? schedule::Algorithm::kOrderedRing
                             : call.kernel == Kernel::kOneShot ? schedule::Algorithm::kOneShot
                                                               : schedule::Algorithm::kTwoShot;
      std::vector<std::byte> tensor(call.num_elems * info(dtype).num_bytes);
      for (uint64_t elem = 0; elem < call.num_elems; ++elem) {
        store_bits(dtype, tensor.data(), elem,
                   input_bits(call, world_size, communicator.rank(), elem));
      }
      const Planner planner(world_size);
      const Call planned =
          call.is_bucket
              ? planner.reduce_bucket(dtype, call.num_elems,
                                      {.wire = call.format,
                                       .pass = {.divisor = static_cast<float>(
                                                    call.op == ReduceOp::kAvg ? world_size : 1),
                                                .stochastic_seed = call.stochastic_seed},
                                       .algorithm = algorithm,
                                       .order = {.is_tree = call.is_tree}})
              : planner.all_reduce(
                    dtype, call.num_elems,
                    {.op = call.op, .algorithm = algorithm, .order = {.is_tree = call.is_tree}});
      cpu::BucketMeasures measures(call.num_elems);
      communicator.run(planned, {.data = tensor.data(), .measures = &measures},
                       CallerThread::kProgress);
      if (communicator.rank() != 0) continue;
      for (uint64_t elem = 0; elem < call.num_elems; ++elem) {
        results[i].push_back(load_bits(dtype, tensor.data(), elem));
      }
    }
  });
  return results;
}

void call_and_check(HostGrid& grid, const std::vector<CheckedCall>& calls) {
  CheckedCalls work(grid, calls);
  grid.run(static_cast<int>(calls.size()), work);
  if (!work.what().empty()) fail(work.what());
}

void call_and_check(HostGrid& grid, const std::vector<KernelCall>& calls) {
  std::vector<CheckedCall> checked;
  for (const KernelCall& call : calls) {
    checked.push_back({call, expected_bits(call, grid.shape().world_size)});
  }
  call_and_check(grid, checked);
}

}  // namespace rota::test
