// pack and unpack against the CPU's bucket reducer, bit for bit: lists of tensors, every dtype and
// wire format, nearest and stochastic rounding, error feedback, Inf and NaN, and the norm.
#include <cmath>
#include <cstring>
#include <deque>

#include "check.h"
#include "cpu/bucket_reducer.h"
#include "cuda/formats.h"
#include "cuda/pack.h"
#include "cuda/unpack.h"
#include "host_grid.h"
#include "kernel_calls.h"
#include "random.h"

namespace rota::test {
namespace {

using schedule::Range;

constexpr float kContributionFactor = 0.375f;
constexpr float kResultFactor = 1.5f;
constexpr uint64_t kSeed = 99;
constexpr int kRank = 0;
constexpr int kNumThreads = 2 * cuda::kWarpThreads;

struct BucketCase {
  DType dtype;
  WireFormat wire;
  std::vector<uint64_t> lengths;  // of the tensors in the list
  size_t misalignment = 0;        // bytes in front of each tensor
  bool is_stochastic = false;
  bool has_residual = false;

  std::string to_string() const {
    return join(name(dtype), " as ", name(wire.dtype), wire.is_block_scaled ? " scaled, " : ", ",
                lengths.size(), " tensors, first of ", lengths.empty() ? 0 : lengths[0],
                " elements", misalignment != 0 ? ", misaligned" : "",
                is_stochastic ? ", at random" : "", has_residual ? ", with residual" : "");
  }
};

// Gradients of many magnitudes, some of them zero or not finite.
std::vector<float> random_gradients(uint64_t num_elems, Random& random) {
  std::vector<float> gradients(num_elems);
  for (float& gradient : gradients) {
    const double mantissa = static_cast<double>(random.below(1 << 24)) / (1 << 23) - 1;
    gradient = static_cast<float>(std::ldexp(mantissa, static_cast<int>(random.below(60)) - 40));
    const uint64_t pick = random.below(4000);
    if (pick < 20) gradient = 0;
    if (pick == 0) gradient = INFINITY;
    if (pick == 1) gradient = NAN;
  }
  return gradients;
}

// One tensor of the list, on both sides.
struct Gradients {
  std::vector<std::byte> gpu, cpu;  // with the misalignment in front
  uint64_t num_elems;
  uint64_t first_tile;
};

// The data of both sides; buffers of the wire format are aligned.
struct Bucket {
  Bucket(const BucketCase& bucket_case, uint64_t seed) {
    Random random(seed);
    const size_t elem_bytes = info(bucket_case.dtype).num_bytes;
    for (const uint64_t num_elems : bucket_case.lengths) {
      const std::vector<float> values = random_gradients(num_elems, random);
      Gradients tensor{.num_elems = num_elems, .first_tile = num_tiles};
      tensor.gpu.resize(bucket_case.misalignment + num_elems * elem_bytes);
      std::byte* data = tensor.gpu.data() + bucket_case.misalignment;
      if (bucket_case.dtype == DType::kFloat32) {
        if (num_elems != 0) std::memcpy(data, values.data(), num_elems * sizeof(float));
      } else {
        cpu::element_loops().convert(DType::kFloat32, bucket_case.dtype)(values.data(), data,
                                                                         num_elems);
      }
      tensor.cpu = tensor.gpu;
      tensors.push_back(std::move(tensor));
      num_tiles += schedule::ceil_div(num_elems, kTileElems);
    }
    const size_t wire_bytes = bucket_case.wire.num_bytes(num_elems());
    gpu_wire.resize(schedule::ceil_div(wire_bytes, sizeof(Line)));
    cpu_wire.resize(gpu_wire.size());
    for (uint64_t i = 0; i < num_elems(); ++i) gpu_residual.push_back(first_residual(i));
    cpu_residual = gpu_residual;
  }

  uint64_t num_elems() const { return num_tiles * kTileElems; }
  static float first_residual(uint64_t elem) { return 0.01f * static_cast<float>(elem % 7); }
  std::vector<cuda::Tile> tiles(const BucketCase& bucket_case) {
    std::vector<cuda::Tile> list;
    const size_t elem_bytes = info(bucket_case.dtype).num_bytes;
    for (Gradients& tensor : tensors) {
      std::byte* data = tensor.gpu.data() + bucket_case.misalignment;
      for (uint64_t elem = 0; elem < tensor.num_elems; elem += kTileElems) {
        list.push_back(
            {data + elem * elem_bytes, schedule::min_of(kTileElems, tensor.num_elems - elem)});
      }
    }
    return list;
  }
  cuda::Tile first_tensor(const BucketCase& bucket_case) {
    if (tensors.empty()) return {};
    return {tensors[0].gpu.data() + bucket_case.misalignment, tensors[0].num_elems};
  }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  uint64_t num_tiles = 0;
  std::vector<Gradients> tensors;
  std::vector<Line> gpu_wire, cpu_wire;
  std::vector<float> gpu_residual, cpu_residual;
};

void check_same_bits(const std::vector<std::byte>& got, const std::vector<std::byte>& expected,
                     DType dtype, std::string_view what) {
  const size_t elem_bytes = info(dtype).num_bytes;
  for (size_t i = 0; i + elem_bytes <= got.size(); i += elem_bytes) {
    if (std::memcmp(&got[i], &expected[i], elem_bytes) == 0) continue;
    float values[2];  // for NaN, whose bits may differ
    for (int side = 0; side < 2; ++side) {
      const std::byte* src = side == 0 ? &got[i] : &expected[i];
      if (dtype == DType::kFloat32) {
        std::memcpy(&values[side], src, sizeof(float));
      } else {
        cpu::element_loops().convert(dtype, DType::kFloat32)(src, &values[side], 1);
      }
    }
    if (!(std::isnan(values[0]) && std::isnan(values[1]))) {
      fail(join(what, ": element ", i / elem_bytes, " is ", values[0], ", expected ", values[1]));
    }
  }
}

// One case on the GPU's side: two launches and the check of their results.
template <DType dtype, DType wire, bool is_scaled>
class PackAndUnpack {
 public:
  PackAndUnpack(const BucketCase& bucket_case, uint64_t seed)
      : case_(bucket_case),
        bucket_(bucket_case, seed),
        tiles_(bucket_.tiles(bucket_case)),
        has_list_(bucket_.tensors.size() > 1 || seed % 2 == 0),
        squares_(schedule::ceil_div(tiles_.size(), kTreeGroup)) {}

  void pack(const HostBlock& block) {
    const cuda::PackArgs args{bucket_args(),
                              case_.has_residual ? bucket_.gpu_residual.data() : nullptr,
                              {case_.is_stochastic, kSeed, kRank},
                              &words_};
    cuda::pack<dtype, wire, is_scaled>(block, args);
  }
  void unpack(const HostBlock& block) {
    const cuda::UnpackArgs args{bucket_args(), squares_.data(), stats_, &words_};
    cuda::unpack<dtype, wire, is_scaled>(block, args);
  }
  void check_all();

 private:
  void check_wire();
  void check_results(const cpu::BucketMeasures& measures);

  std::byte* wire_buffer() { return reinterpret_cast<std::byte*>(bucket_.gpu_wire.data()); }
  // Starting at an element.
  WirePlace gpu_wire(uint64_t elem) { return wire_from(wire_buffer(), elem); }
  WirePlace cpu_wire(uint64_t elem) {
    return wire_from(reinterpret_cast<std::byte*>(bucket_.cpu_wire.data()), elem);
  }
  WirePlace wire_from(std::byte* buffer, uint64_t elem) const {
    return case_.wire.from(case_.wire.place(buffer, bucket_.num_elems()), elem);
  }
  cuda::BucketArgs bucket_args() {
    return {has_list_ ? tiles_.data() : nullptr,
            bucket_.first_tensor(case_),
            tiles_.size(),
            wire_buffer(),
            kContributionFactor,
            kResultFactor};
  }

  BucketCase case_;
  Bucket bucket_;
  std::vector<cuda::Tile> tiles_;
  bool has_list_;  // one tensor needs no list, but may have one
  std::vector<double> squares_;
  cuda::UnpackWords words_{99, 99};  // as in uninitialised memory
  double stats_[2] = {-1, -1};
};

// Runs the CPU's reducer, one tensor after another, with the same places in the wire format.
template <DType dtype, DType wire, bool is_scaled>
void PackAndUnpack<dtype, wire, is_scaled>::check_all() {
  Call call{.kind = CollectiveKind::kReduceBucket,
            .op = ReduceOp::kAvg,
            .dtype = dtype,
            .wire = case_.wire,
            .hop = DType::kFloat32,
            .num_elems = bucket_.num_elems(),
            .pass = {.contribution_factor = kContributionFactor, .result_factor = kResultFactor}};
  if (case_.is_stochastic) call.pass.stochastic_seed = kSeed;
  cpu::BucketMeasures measures(bucket_.num_elems());
  const auto for_each_tensor = [&](const auto& body) {
    for (Gradients& tensor : bucket_.tensors) {
      if (tensor.num_elems == 0) continue;
      const uint64_t first = tensor.first_tile * kTileElems;
      // Pretends that the bucket begins this far before the tensor: places count from its start.
      const size_t elem_bytes = info(dtype).num_bytes;
      std::byte* data = tensor.cpu.data() + case_.misalignment - first * elem_bytes;
      const cpu::Buffers buffers{
          .data = data,
          .residual = case_.has_residual ? bucket_.cpu_residual.data() : nullptr,
          .measures = &measures};
      const Range range{first, tensor.num_elems};
      body(cpu::BucketReducer(call, buffers, kRank, 1), range, cpu_wire(first));
    }
  };
  for_each_tensor([](const cpu::BucketReducer& reducer, const Range& range, const WirePlace& dst) {
    reducer.pack(range, dst);
  });
  check_wire();
  for_each_tensor([](const cpu::BucketReducer& reducer, const Range& range, const WirePlace& src) {
    reducer.unpack(src, range);
  });
  check_results(measures);
}

template <DType dtype, DType wire, bool is_scaled>
void PackAndUnpack<dtype, wire, is_scaled>::check_wire() {
  const std::string what = case_.to_string();
  const auto& loops = cpu::element_loops().wire(case_.wire);
  for (const Gradients& tensor : bucket_.tensors) {
    const uint64_t first = tensor.first_tile * kTileElems;
    std::vector<float> got(tensor.num_elems), expected(tensor.num_elems);
    const WirePlace places[] = {gpu_wire(first), cpu_wire(first)};
    loops.decode_sum({&places[0], 1}, got.data(), tensor.num_elems, 1);
    loops.decode_sum({&places[1], 1}, expected.data(), tensor.num_elems, 1);
    for (uint64_t i = 0; i < tensor.num_elems; ++i) {
      const bool is_same = got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]));
      check(is_same,
            join(what, ": element ", i, " travels as ", got[i], ", expected ", expected[i]));
      if (!case_.has_residual) continue;
      check_equal(bucket_.gpu_residual[first + i], bucket_.cpu_residual[first + i],
                  what + ": residual");
    }
    // What completes the last tile may be somebody else's.
    for (uint64_t i = first + tensor.num_elems; case_.has_residual && i % kTileElems != 0; ++i) {
      check_equal(bucket_.gpu_residual[i], Bucket::first_residual(i),
                  what + ": behind the residual");
    }
    const size_t num_scales = case_.wire.num_scales(tensor.num_elems);
    check(std::memcmp(places[0].scales, places[1].scales, num_scales) == 0,
          what + ": other scales");
  }
}

template <DType dtype, DType wire, bool is_scaled>
void PackAndUnpack<dtype, wire, is_scaled>::check_results(const cpu::BucketMeasures& measures) {
  const std::string what = case_.to_string();
  for (const Gradients& tensor : bucket_.tensors) {
    check_same_bits(tensor.gpu, tensor.cpu, dtype, what + ": result");
  }
  const double expected = measures.sum_of_squares();
  check(stats_[1] == expected || (std::isnan(expected) && std::isnan(stats_[1])),
        join(what, ": sum of squares is ", stats_[1], ", expected ", expected));
  check_equal(stats_[0], static_cast<double>(measures.num_non_finite), what + ": not finite");
  check_equal(words_.num_non_finite, uint64_t{0}, what + ": count of what is not finite, at rest");
  check_equal(words_.num_blocks_done, 0u, what + ": blocks done, at rest");
}

// Runs all cases of one kernel on the same threads, which take longer to start than most cases.
template <DType dtype, DType wire, bool is_scaled>
void pack_and_unpack(const std::vector<BucketCase>& cases, uint64_t first_seed) {
  struct Launches {
    std::deque<PackAndUnpack<dtype, wire, is_scaled>> cases;

    int num_blocks(int) const { return 2; }
    int late_rank(int) const { return kNobody; }
    void prepare(int, int) const {}
    void launch(const HostBlock& block, int, int number) {
      auto& one = cases[static_cast<size_t>(number / 2)];
      if (number % 2 == 0) {
        one.pack(block);
      } else {
        one.unpack(block);
      }
    }
    bool finish(int, int) const { return true; }
  };
  Launches launches;
  for (const BucketCase& bucket_case : cases)
    launches.cases.emplace_back(bucket_case, first_seed++);
  HostGrid grid({.world_size = 1, .num_blocks = 2, .num_threads = kNumThreads});
  grid.run(2 * static_cast<int>(cases.size()), launches);
  for (auto& one : launches.cases) one.check_all();
}

// The last list has work for every warp of both blocks, and a group that is not full.
const std::vector<std::vector<uint64_t>> kLists = {
    {}, {1}, {511}, {512}, {513}, {10'000}, {3, 512, 0, 1000, 1, 2048, 777, 3000, 4000}};

std::vector<BucketCase> cases_of(DType dtype, const WireFormat& wire, uint64_t first_seed) {
  std::vector<BucketCase> cases;
  for (const auto& lengths : kLists) {
    for (int variant = 0; variant < 4; ++variant) {
      const bool is_misaligned = (first_seed + cases.size()) % 3 == 0;
      cases.push_back({.dtype = dtype,
                       .wire = wire,
                       .lengths = lengths,
                       .misalignment = is_misaligned ? info(dtype).num_bytes : 0,
                       .is_stochastic = (variant & 1) != 0,
                       .has_residual = (variant & 2) != 0});
    }
  }
  return cases;
}

void check_dtype(DType dtype) {
  uint64_t seed = 0;
  for (size_t wire = 0; wire < kNumDTypes; ++wire) {
    for (const bool is_scaled : {false, true}) {
      const WireFormat format{static_cast<DType>(wire), is_scaled};
      const std::vector<BucketCase> cases = cases_of(dtype, format, seed);
      cuda::with_bucket_formats(dtype, format, [&](auto dtype_constant, auto codec) {
        constexpr WireFormat kWire = decltype(codec)::format();
        pack_and_unpack<dtype_constant(), kWire.dtype, kWire.is_block_scaled>(cases, seed);
        return true;
      });
      seed += cases.size();
    }
  }
}

void float32_gradients_have_the_cpus_bits() { check_dtype(DType::kFloat32); }
void float64_gradients_have_the_cpus_bits() { check_dtype(DType::kFloat64); }
void float16_gradients_have_the_cpus_bits() { check_dtype(DType::kFloat16); }
void bfloat16_gradients_have_the_cpus_bits() { check_dtype(DType::kBFloat16); }

// One small case with a bit of everything, for mutants: both blocks have six groups, two more than
// they keep the sums of, and so one more for each warp.
void a_list_of_gradients_has_the_cpus_bits() {
  std::vector<uint64_t> lengths(10 * kTreeGroup, 1);
  lengths.insert(lengths.end(), kLists.back().begin(), kLists.back().end());
  pack_and_unpack<DType::kFloat32, DType::kFloat16, true>(
      {{.dtype = DType::kFloat32, .wire = {DType::kFloat16, true}, .lengths = lengths}}, 1);
}

// Follows the description in base/fixed_tree.h step by step.
double sum_by_definition(const std::vector<double>& groups) {
  std::vector<double> sums(kTreeBins);
  for (size_t i = 0; i < groups.size(); ++i) sums[i % kTreeBins] += groups[i];
  while (sums.size() > 1) {
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    sums.resize(sums.size() / 2);
  }
  return sums[0];
}

// From no groups at all to enough for several rounds of loads.
void squares_are_summed_in_the_fixed_tree() {
  struct Launches {
    std::vector<std::vector<double>> groups;
    std::vector<double> sums;

    int num_blocks(int) const { return 1; }
    int late_rank(int) const { return kNobody; }
    void prepare(int, int) const {}
    void launch(const HostBlock& block, int, int number) {
      const auto place = static_cast<size_t>(number);
      const double sum = sum_in_fixed_tree(block, groups[place].data(), groups[place].size(),
                                           block.shared_doubles());
      if (block.thread() == 0) sums[place] = sum;
    }
    bool finish(int, int) const { return true; }
  };
  Launches launches;
  for (const size_t num_groups : {0, 1, 3, 4, 511, 512, 513, 2046, 2048, 2049, 9001}) {
    std::vector<double> groups(num_groups);
    for (size_t i = 0; i < num_groups; ++i) groups[i] = 1.0 / static_cast<double>(i * i % 97 + 3);
    launches.groups.push_back(std::move(groups));
  }
  launches.sums.resize(launches.groups.size());
  HostGrid grid({.world_size = 1, .num_blocks = 1, .num_threads = kNumThreads});
  grid.run(static_cast<int>(launches.groups.size()), launches);
  for (size_t i = 0; i < launches.groups.size(); ++i) {
    const std::vector<double>& groups = launches.groups[i];
    double shared[kTreeDoubles];
    const double alone = sum_in_fixed_tree(LoneThread{}, groups.data(), groups.size(), shared);
    check_equal(alone, sum_by_definition(groups), join(groups.size(), " groups, one thread"));
    check_equal(launches.sums[i], alone, join(groups.size(), " groups, a block"));
  }
}

const CaseTable kCases{
    {"kernel_bucket-tree", squares_are_summed_in_the_fixed_tree},
    {"kernel_bucket-once", a_list_of_gradients_has_the_cpus_bits},
    {"kernel_bucket-float32", float32_gradients_have_the_cpus_bits},
    {"kernel_bucket-float64", float64_gradients_have_the_cpus_bits},
    {"kernel_bucket-float16", float16_gradients_have_the_cpus_bits},
    {"kernel_bucket-bfloat16", bfloat16_gradients_have_the_cpus_bits},
};

}  // namespace
}  // namespace rota::test
