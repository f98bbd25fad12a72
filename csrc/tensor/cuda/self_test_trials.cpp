#include "tensor/cuda/self_test_trials.h"

#include <cmath>
#include <cstring>
#include <iomanip>

#include "base/error.h"
#include "base/fixed_tree.h"
#include "cpu/bucket_reducer.h"
#include "cpu/element_loops.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/self_test_numbers.h"
#include "tensor/cuda/self_test_sums.h"

namespace rota::tensors {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kAlignment = 256;  // of the parts of the trials' memory
constexpr size_t kGuardBytes = 64;  // after each tensor; must not change
constexpr auto kGuard = std::byte{0xa5};
// Several chunks, tiles and channels, and no multiple of 16 bytes in any dtype.
constexpr uint64_t kNumElems = 2061;
constexpr int kRoot = 2;
constexpr int kReceiver = 1;
constexpr float kContributionFactor = 0.375f;
constexpr float kResultFactor = 1.5f;

// A kernel is tried twice: with tensors that start at multiples of 16 bytes and hold extremes, and
// with tensors that start elsewhere (unless in scaled blocks) and have finite sums.
struct Variant {
  Extremes extremes;
  bool is_aligned;
};
constexpr Variant kVariants[] = {{Extremes::kSome, true}, {Extremes::kNone, false}};

// Lays out the memory, and fills both its contents before and those expected after the launch.
class Builder {
 public:
  Builder(Trials& all, size_t number)
      : all_(all), trial_{.number = number, .results = {}, .launch = {}} {}

  const TestedKernel& tested() const { return tested_kernels()[trial_.number]; }

  // Places a tensor with a guard after it; returns its offset.
  size_t place(const Bytes& contents, size_t misalignment, const std::string& owner) {
    const size_t offset =
        schedule::ceil_div(all_.before.size(), kAlignment) * kAlignment + misalignment;
    const size_t end = offset + contents.size();
    all_.before.resize(end + kGuardBytes, kGuard);
    std::copy(contents.begin(), contents.end(),
              all_.before.begin() + static_cast<ptrdiff_t>(offset));
    all_.expected.resize(offset);
    all_.expected.insert(all_.expected.end(), all_.before.begin() + static_cast<ptrdiff_t>(offset),
                         all_.before.end());
    trial_.results.push_back({end, kGuardBytes, DType::kUInt8, "behind the tensor " + owner});
    return offset;
  }
  std::byte* before(size_t offset) { return all_.before.data() + offset; }
  std::byte* expected(size_t offset) { return all_.expected.data() + offset; }

  // Adds a result, which is compared before the guards.
  void expect(size_t offset, uint64_t num_elems, DType dtype, const std::string& place) {
    trial_.results.insert(trial_.results.begin() + num_expected_++,
                          {offset, num_elems, dtype, place});
  }
  void expect(size_t offset, uint64_t num_elems, const WireFormat& format,
              const std::string& place) {
    expect(offset, num_elems, format.dtype, place);
    if (!format.is_block_scaled) return;
    expect(offset + format.payload_bytes(num_elems), format.num_scales(num_elems), DType::kUInt8,
           "of the scales " + place);
  }

  void finish(decltype(Trial::launch) launch) {
    trial_.launch = std::move(launch);
    all_.trials.push_back(std::move(trial_));
  }

 private:
  Trials& all_;
  Trial trial_;
  ptrdiff_t num_expected_ = 0;
};

std::string of_rank(int rank) { return join("of local rank ", rank); }

uint64_t seed_of(size_t number, const Variant& variant, int rank) {
  return (number * 2 + variant.is_aligned) * kSelfTestRanks + static_cast<uint64_t>(rank);
}

size_t misalignment_of(const WireFormat& format, const Variant& variant) {
  if (variant.is_aligned || format.is_block_scaled) return 0;
  return info(format.dtype).num_bytes;
}

ReduceOp op_of(const WireFormat& format, const Variant& variant) {
  if (variant.is_aligned) return ReduceOp::kSum;
  return is_defined(ReduceOp::kAvg, format.dtype) ? ReduceOp::kAvg : ReduceOp::kMax;
}

Contributions make_contributions(Builder& builder, size_t number, uint64_t num_elems,
                                 const Variant& variant) {
  Contributions contributions;
  for (int rank = 0; rank < kSelfTestRanks; ++rank) {
    contributions[rank] = numbers(builder.tested().format, num_elems, variant.extremes,
                                  seed_of(number, variant, rank));
  }
  return contributions;
}

// Where a collective's tensors lie, by rank.
struct Places {
  std::array<size_t, kSelfTestRanks> input;
  std::array<size_t, kSelfTestRanks> output;
};

void finish_collective(Builder& builder, cuda::LaunchRequest request, const Places& places) {
  builder.finish(
      [request, places](std::byte* memory, cuda::Executor& executor, cuda::Stream stream) mutable {
        cuda::MappedTensors mapped{};
        for (size_t rank = 0; rank < kSelfTestRanks; ++rank) {
          request.input[rank] = memory + places.input[rank];
          request.output[rank] = memory + places.output[rank];
          mapped.of[rank] = memory + places.output[rank];
        }
        request.tensors = &mapped;
        executor.run(executor.plan(request), stream);
      });
}

// In place, as communicators call it.
void add_all_reduce(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const WireFormat& format = builder.tested().format;
  const cuda::Kernel kernel = builder.tested().collective;
  const uint64_t num_elems =
      format.is_block_scaled ? schedule::ceil_div(kNumElems, kTileElems) * kTileElems : kNumElems;
  const ReduceOp op = op_of(format, variant);
  Contributions contributions = make_contributions(builder, number, num_elems, variant);
  const cuda::Sums sums = builder.tested().sums;
  const Bytes result = all_reduced(kernel, sums, format, op, num_elems, contributions);
  Places places{};
  for (int rank = 0; rank < kSelfTestRanks; ++rank) {
    const size_t offset =
        builder.place(contributions[rank], misalignment_of(format, variant), of_rank(rank));
    std::copy(result.begin(), result.end(), builder.expected(offset));
    builder.expect(offset, num_elems, format, of_rank(rank));
    places.input[rank] = places.output[rank] = offset;
  }
  finish_collective(builder,
                    {.kernel = kernel,
                     .num_elems = num_elems,
                     .format = format,
                     .op = op,
                     .divisor = kSelfTestDivisor,
                     .sums = sums,
                     .group_size = kernel == cuda::Kernel::kHierarchical ? kSelfTestGroupSize : 0,
                     .is_bucket = format.is_block_scaled},
                    places);
}

void add_reduce_scatter(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const WireFormat& format = builder.tested().format;
  const ReduceOp op = op_of(format, variant);
  const uint64_t shard_elems = kNumElems / kSelfTestRanks;
  const uint64_t num_elems = shard_elems * kSelfTestRanks;
  Contributions contributions = make_contributions(builder, number, num_elems, variant);
  const cuda::Sums sums = builder.tested().sums;
  const Bytes result =
      all_reduced(builder.tested().collective, sums, format, op, num_elems, contributions);
  const size_t misalignment = misalignment_of(format, variant);
  const size_t shard_bytes = format.num_bytes(shard_elems);
  Places places{};
  for (int rank = 0; rank < kSelfTestRanks; ++rank) {
    places.input[rank] = builder.place(contributions[rank], misalignment, of_rank(rank));
    places.output[rank] = builder.place(Bytes(shard_bytes), misalignment, of_rank(rank));
    std::copy_n(result.data() + static_cast<size_t>(rank) * shard_bytes, shard_bytes,
                builder.expected(places.output[rank]));
    builder.expect(places.output[rank], shard_elems, format, of_rank(rank));
  }
  finish_collective(builder,
                    {.kernel = cuda::Kernel::kReduceScatter,
                     .num_elems = num_elems,
                     .format = format,
                     .op = op,
                     .divisor = kSelfTestDivisor,
                     .sums = sums},
                    places);
}

void add_all_gather(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const uint64_t shard_bytes = kNumElems;
  const size_t misalignment = misalignment_of(cuda::kBytes, variant);
  const Contributions contributions = make_contributions(builder, number, shard_bytes, variant);
  Places places{};
  for (int rank = 0; rank < kSelfTestRanks; ++rank) {
    places.input[rank] = builder.place(contributions[rank], misalignment, of_rank(rank));
    places.output[rank] =
        builder.place(Bytes(shard_bytes * kSelfTestRanks), misalignment, of_rank(rank));
    std::byte* expected = builder.expected(places.output[rank]);
    for (const Bytes& shard : contributions)
      expected = std::copy(shard.begin(), shard.end(), expected);
    builder.expect(places.output[rank], shard_bytes * kSelfTestRanks, cuda::kBytes, of_rank(rank));
  }
  finish_collective(builder,
                    {.kernel = cuda::Kernel::kAllGather,
                     .num_elems = shard_bytes * kSelfTestRanks,
                     .format = cuda::kBytes},
                    places);
}

// Broadcast to all ranks, or transfer to one; the others' tensors stay as they are.
void add_copy(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const cuda::Kernel kernel = builder.tested().collective;
  const Contributions contributions = make_contributions(builder, number, kNumElems, variant);
  Places places{};
  for (int rank = 0; rank < kSelfTestRanks; ++rank) {
    const size_t offset =
        builder.place(contributions[rank], misalignment_of(cuda::kBytes, variant), of_rank(rank));
    if (kernel == cuda::Kernel::kBroadcast || rank == kReceiver) {
      std::copy(contributions[kRoot].begin(), contributions[kRoot].end(), builder.expected(offset));
    }
    builder.expect(offset, kNumElems, cuda::kBytes, of_rank(rank));
    places.input[rank] = places.output[rank] = offset;
  }
  finish_collective(builder,
                    {.kernel = kernel,
                     .num_elems = kNumElems,
                     .format = cuda::kBytes,
                     .source = kRoot,
                     .destination = kReceiver},
                    places);
}

void add_collective(Trials& all, size_t number, const Variant& variant) {
  switch (tested_kernels()[number].collective) {
    case cuda::Kernel::kLowLatency:
    case cuda::Kernel::kOneShot:
    case cuda::Kernel::kTwoShot:
    case cuda::Kernel::kTwoShotInPlace:
    case cuda::Kernel::kOrderedRing:
    case cuda::Kernel::kRing:
    case cuda::Kernel::kHierarchical:
      return add_all_reduce(all, number, variant);
    case cuda::Kernel::kReduceScatter:
      return add_reduce_scatter(all, number, variant);
    case cuda::Kernel::kAllGather:
      return add_all_gather(all, number, variant);
    case cuda::Kernel::kBroadcast:
    case cuda::Kernel::kTransfer:
      return add_copy(all, number, variant);
  }
}

constexpr uint64_t kNumTiles = schedule::ceil_div(kNumElems, kTileElems);

// Where the parts of a bucket lie in the trials' memory, on the host as on the GPU.
struct BucketPlaces {
  size_t gradients, wire, words;

  cuda::UnpackWords* words_in(std::byte* memory) const {
    return reinterpret_cast<cuda::UnpackWords*>(memory + words);
  }
  cuda::BucketArgs args(std::byte* memory) const {
    return bucket_of(memory + gradients, kNumElems, memory + wire, kContributionFactor,
                     kResultFactor);
  }
};

void expect_words_at_rest(Builder& builder, const BucketPlaces& places) {
  *places.words_in(builder.expected(0)) = {};
  builder.expect(places.words + offsetof(cuda::UnpackWords, num_non_finite), 1, DType::kUInt64,
                 "of the non-finite results");
  builder.expect(places.words + offsetof(cuda::UnpackWords, num_blocks_done), 1, DType::kUInt32,
                 "of the blocks done");
}

Call bucket_call(const TestedKernel& tested) {
  return {.kind = CollectiveKind::kReduceBucket,
          .op = ReduceOp::kAvg,
          .dtype = tested.gradients,
          .wire = tested.format,
          .hop = DType::kFloat32,
          .num_elems = kNumElems,
          .pass = {.contribution_factor = kContributionFactor, .result_factor = kResultFactor}};
}

// With error feedback.
void add_pack(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const TestedKernel& tested = builder.tested();
  const WireFormat& wire = tested.format;
  const Bytes gradients =
      plain_numbers(tested.gradients, kNumElems, variant.extremes, seed_of(number, variant, 0));
  const Bytes residual = plain_numbers(DType::kFloat32, kNumTiles * kTileElems, Extremes::kNone,
                                       seed_of(number, variant, 1));
  const BucketPlaces places{
      .gradients =
          builder.place(gradients, misalignment_of({tested.gradients}, variant), "of gradients"),
      .wire = builder.place(Bytes(wire.num_bytes(kNumTiles * kTileElems)), 0, "on the wire"),
      .words = builder.place(Bytes(sizeof(cuda::UnpackWords), std::byte{1}), 0, "of words")};
  const size_t residual_place = builder.place(residual, 0, "of residuals");

  const cpu::Buffers buffers{
      .data = builder.before(places.gradients),
      .residual = reinterpret_cast<float*>(builder.expected(residual_place))};
  const WirePlace packed = wire.place(builder.expected(places.wire), kNumTiles * kTileElems);
  cpu::BucketReducer(bucket_call(tested), buffers, 0, 1).pack({0, kNumElems}, packed);
  builder.expect(places.wire, kNumElems, wire.dtype, "on the wire");
  builder.expect(places.wire + wire.payload_bytes(kNumTiles * kTileElems),
                 wire.num_scales(kNumElems), DType::kUInt8, "of the scales");
  builder.expect(residual_place, kNumElems, DType::kFloat32, "of the residual");
  expect_words_at_rest(builder, places);
  builder.finish([places, residual_place, gradients = tested.gradients, wire](
                     std::byte* memory, cuda::Executor&, cuda::Stream stream) {
    cuda::launch_pack({.bucket = places.args(memory),
                       .residual = reinterpret_cast<float*>(memory + residual_place),
                       .rounding = {},
                       .words = places.words_in(memory)},
                      gradients, wire, stream);
  });
}

void add_unpack(Trials& all, size_t number, const Variant& variant) {
  Builder builder(all, number);
  const TestedKernel& tested = builder.tested();
  const WireFormat& wire = tested.format;
  const Bytes packed =
      numbers(wire, kNumTiles * kTileElems, variant.extremes, seed_of(number, variant, 0));
  const BucketPlaces places{
      .gradients = builder.place(Bytes(kNumElems * info(tested.gradients).num_bytes),
                                 misalignment_of({tested.gradients}, variant), "of gradients"),
      .wire = builder.place(packed, 0, "on the wire"),
      .words = builder.place(Bytes(sizeof(cuda::UnpackWords)), 0, "of words")};
  const uint64_t num_groups = schedule::ceil_div(kNumTiles, kTreeGroup);
  const size_t squares = builder.place(Bytes(num_groups * sizeof(double)), 0, "of squares");
  const size_t stats = builder.place(Bytes(2 * sizeof(double)), 0, "of stats");

  cpu::BucketMeasures measures(kNumElems);
  const cpu::Buffers buffers{.data = builder.expected(places.gradients), .measures = &measures};
  cpu::BucketReducer(bucket_call(tested), buffers, 0, 1)
      .unpack(wire.place(builder.before(places.wire), kNumTiles * kTileElems), {0, kNumElems});
  const double expected_stats[] = {static_cast<double>(measures.num_non_finite),
                                   measures.sum_of_squares()};
  std::memcpy(builder.expected(stats), expected_stats, sizeof(expected_stats));
  builder.expect(places.gradients, kNumElems, tested.gradients, "of the gradients");
  builder.expect(stats, 2, DType::kFloat64, "of the stats");
  expect_words_at_rest(builder, places);
  builder.finish([places, squares, stats, gradients = tested.gradients, wire](
                     std::byte* memory, cuda::Executor&, cuda::Stream stream) {
    cuda::launch_unpack({.bucket = places.args(memory),
                         .squares = reinterpret_cast<double*>(memory + squares),
                         .stats = reinterpret_cast<double*>(memory + stats),
                         .words = places.words_in(memory)},
                        gradients, wire, stream);
  });
}

bool is_nan(const std::byte* elem, DType dtype) {
  if (!info(dtype).is_floating) return false;
  if (dtype == DType::kFloat64) {
    double number;
    std::memcpy(&number, elem, sizeof(number));
    return std::isnan(number);
  }
  float number;
  if (dtype == DType::kFloat32) {
    std::memcpy(&number, elem, sizeof(number));
  } else {
    cpu::element_loops().convert(dtype, DType::kFloat32)(elem, &number, 1);
  }
  return std::isnan(number);
}

std::string bits_of(const std::byte* elem, size_t num_bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, elem, num_bytes);
  auto text = in_classic_locale<std::ostringstream>();
  text << "0x" << std::hex << std::setfill('0') << std::setw(static_cast<int>(2 * num_bytes))
       << bits;
  return text.str();
}

}  // namespace

Trials make_trials(size_t begin, size_t end) {
  Trials all;
  for (size_t number = begin; number < end; ++number) {
    for (const Variant& variant : kVariants) {
      switch (tested_kernels()[number].role) {
        case TestedKernel::Role::kCollective:
          add_collective(all, number, variant);
          break;
        case TestedKernel::Role::kPack:
          add_pack(all, number, variant);
          break;
        case TestedKernel::Role::kUnpack:
          add_unpack(all, number, variant);
          break;
      }
    }
  }
  return all;
}

std::string find_difference(const TrialResult& result, const std::vector<std::byte>& memory,
                            const std::vector<std::byte>& expected) {
  const size_t elem_bytes = info(result.dtype).num_bytes;
  const std::byte* got = memory.data() + result.offset;
  const std::byte* wanted = expected.data() + result.offset;
  if (std::memcmp(got, wanted, result.num_elems * elem_bytes) == 0) return "";
  for (uint64_t i = 0; i < result.num_elems; ++i, got += elem_bytes, wanted += elem_bytes) {
    if (std::memcmp(got, wanted, elem_bytes) == 0) continue;
    if (is_nan(got, result.dtype) && is_nan(wanted, result.dtype)) continue;
    return join("element ", i, ' ', result.place, " is ", bits_of(got, elem_bytes), ", expected ",
                bits_of(wanted, elem_bytes));
  }
  return "";
}

}  // namespace rota::tensors
