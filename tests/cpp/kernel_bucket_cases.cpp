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
#include "reference.h"

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

// Of many magnitudes, some of them zero or not finite.
double random_gradient(Random& random) {
  const int pick = random.below(4000);
  if (pick == 0) return INFINITY;
  if (pick == 1) return NAN;
  const double mantissa = static_cast<double>(random.below(1 << 24)) / (1 << 23) - 1;
  return pick < 20 ? 0 : std::ldexp(mantissa, random.below(60) - 40);
}

// One tensor of the list, on both sides.
struct Gradients {
  std::vector<std::byte> gpu, cpu;  // with the misalignment in front
  uint64_t num_elems;
  uint64_t first_tile;
};

// One case: the data of both sides, the two launches on the GPU's side and the check of their
// results.
class PackAndUnpack {
 public:
  PackAndUnpack(const BucketCase& bucket_case, uint64_t seed) : case_(bucket_case) {
    Random random(seed);
    const size_t elem_bytes = info(case_.dtype).num_bytes;
    for (const uint64_t num_elems : case_.lengths) {
      Gradients& tensor =
          tensors_.emplace_back(Gradients{.num_elems = num_elems, .first_tile = tiles_.size()});
      tensor.gpu.resize(case_.misalignment + num_elems * elem_bytes);
      std::byte* data = tensor.gpu.data() + case_.misalignment;
      for (uint64_t i = 0; i < num_elems; ++i) {
        store_bits(case_.dtype, data, i, round_to(case_.dtype, random_gradient(random)));
      }
      tensor.cpu = tensor.gpu;
      for (uint64_t elem = 0; elem < num_elems; elem += kTileElems) {
        tiles_.push_back(
            {data + elem * elem_bytes, schedule::min_of(kTileElems, num_elems - elem)});
      }
    }
    has_list_ = tensors_.size() > 1 || seed % 2 == 0;
    if (!tensors_.empty()) {
      first_ = {tensors_[0].gpu.data() + case_.misalignment, tensors_[0].num_elems};
    }
    squares_.resize(schedule::ceil_div(tiles_.size(), kTreeGroup));
    gpu_wire_.resize(schedule::ceil_div(case_.wire.num_bytes(num_elems()), sizeof(Line)));
    cpu_wire_.resize(gpu_wire_.size());
    for (uint64_t i = 0; i < num_elems(); ++i) gpu_residual_.push_back(first_residual(i));
    cpu_residual_ = gpu_residual_;
  }

  void launch(const HostBlock& block, bool packs) {
    cuda::with_bucket_formats(case_.dtype, case_.wire, [&](auto dtype, auto codec) {
      constexpr WireFormat kWire = decltype(codec)::format();
      if (packs) {
        cuda::pack<dtype(), kWire.dtype, kWire.is_block_scaled>(
            block, {bucket_args(),
                    case_.has_residual ? gpu_residual_.data() : nullptr,
                    {case_.is_stochastic, kSeed, kRank},
                    &words_});
      } else {
        cuda::unpack<dtype(), kWire.dtype, kWire.is_block_scaled>(
            block, {bucket_args(), squares_.data(), stats_, &words_});
      }
      return true;
    });
  }
  void check_all();

 private:
  void check_wire();
  void check_results(const cpu::BucketMeasures& measures);

  struct alignas(64) Line {
    std::byte bytes[64];
  };

  uint64_t num_elems() const { return tiles_.size() * kTileElems; }
  static float first_residual(uint64_t elem) { return 0.01f * static_cast<float>(elem % 7); }
  // Starting at an element.
  WirePlace place_of(std::vector<Line>& wire, uint64_t elem) const {
    auto* buffer = reinterpret_cast<std::byte*>(wire.data());
    return case_.wire.from(case_.wire.place(buffer, num_elems()), elem);
  }
  cuda::BucketArgs bucket_args() {
    return {has_list_ ? tiles_.data() : nullptr,
            first_,
            tiles_.size(),
            reinterpret_cast<std::byte*>(gpu_wire_.data()),
            kContributionFactor,
            kResultFactor};
  }

  BucketCase case_;
  std::vector<Gradients> tensors_;
  std::vector<cuda::Tile> tiles_;
  cuda::Tile first_{};  // the whole first tensor
  bool has_list_;       // one tensor needs no list, but may have one
  std::vector<Line> gpu_wire_, cpu_wire_;
  std::vector<float> gpu_residual_, cpu_residual_;
  std::vector<double> squares_;
  cuda::UnpackWords words_{99, 99};  // as in uninitialised memory
  double stats_[2] = {-1, -1};
};

// Runs the CPU's reducer, one tensor after another, with the same places in the wire format.
void PackAndUnpack::check_all() {
  Call call{.kind = CollectiveKind::kReduceBucket,
            .op = ReduceOp::kAvg,
            .dtype = case_.dtype,
            .wire = case_.wire,
            .hop = DType::kFloat32,
            .num_elems = num_elems(),
            .pass = {.contribution_factor = kContributionFactor, .result_factor = kResultFactor}};
  if (case_.is_stochastic) call.pass.stochastic_seed = kSeed;
  cpu::BucketMeasures measures(num_elems());
  const auto for_each_tensor = [&](const auto& body) {
    for (Gradients& tensor : tensors_) {
      if (tensor.num_elems == 0) continue;
      const uint64_t first = tensor.first_tile * kTileElems;
      // Pretends that the bucket begins this far before the tensor: places count from its start.
      const size_t elem_bytes = info(case_.dtype).num_bytes;
      std::byte* data = tensor.cpu.data() + case_.misalignment - first * elem_bytes;
      const cpu::Buffers buffers{.data = data,
                                 .residual = case_.has_residual ? cpu_residual_.data() : nullptr,
                                 .measures = &measures};
      const Range range{first, tensor.num_elems};
      body(cpu::BucketReducer(call, buffers, kRank, 1), range, place_of(cpu_wire_, first));
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

void PackAndUnpack::check_wire() {
  const std::string what = case_.to_string();
  const auto& loops = cpu::element_loops().wire(case_.wire);
  for (const Gradients& tensor : tensors_) {
    const uint64_t first = tensor.first_tile * kTileElems;
    std::vector<float> got(tensor.num_elems), expected(tensor.num_elems);
    const WirePlace places[] = {place_of(gpu_wire_, first), place_of(cpu_wire_, first)};
    loops.decode_sum({&places[0], 1}, got.data(), tensor.num_elems, 1);
    loops.decode_sum({&places[1], 1}, expected.data(), tensor.num_elems, 1);
    for (uint64_t i = 0; i < tensor.num_elems; ++i) {
      check(is_same(got[i], expected[i]),
            join(what, ": element ", i, " travels as ", got[i], ", expected ", expected[i]));
      if (!case_.has_residual) continue;
      check_equal(gpu_residual_[first + i], cpu_residual_[first + i], what + ": residual");
    }
    // What completes the last tile may be somebody else's.
    for (uint64_t i = first + tensor.num_elems; case_.has_residual && i % kTileElems != 0; ++i) {
      check_equal(gpu_residual_[i], first_residual(i), what + ": behind the residual");
    }
    const size_t num_scales = case_.wire.num_scales(tensor.num_elems);
    check(std::memcmp(places[0].scales, places[1].scales, num_scales) == 0,
          what + ": other scales");
  }
}

void PackAndUnpack::check_results(const cpu::BucketMeasures& measures) {
  const std::string what = case_.to_string();
  for (const Gradients& tensor : tensors_) {
    for (uint64_t i = 0; i < tensor.gpu.size() / info(case_.dtype).num_bytes; ++i) {
      const uint64_t got = load_bits(case_.dtype, tensor.gpu.data(), i);
      const uint64_t expected = load_bits(case_.dtype, tensor.cpu.data(), i);
      if (is_same(case_.dtype, got, expected)) continue;
      fail(join(what, ": result ", i, " has bits ", got, ", expected ", expected));
    }
  }
  const double expected = measures.sum_of_squares();
  check(is_same(stats_[1], expected),
        join(what, ": sum of squares is ", stats_[1], ", expected ", expected));
  check_equal(stats_[0], static_cast<double>(measures.num_non_finite), what + ": not finite");
  check_equal(words_.num_non_finite, 0, what + ": count of what is not finite, at rest");
  check_equal(words_.num_blocks_done, 0u, what + ": blocks done, at rest");
}

// Runs all cases on the same threads, which take longer to start than most cases.
void pack_and_unpack(const std::vector<BucketCase>& cases) {
  struct Launches : PlainWork {
    std::deque<PackAndUnpack> cases;

    int num_blocks(int) const { return 2; }
    void launch(const HostBlock& block, int, int number) {
      cases[static_cast<size_t>(number / 2)].launch(block, number % 2 == 0);
    }
  };
  Launches launches;
  for (const BucketCase& bucket_case : cases) {
    launches.cases.emplace_back(bucket_case, launches.cases.size());
  }
  HostGrid grid({.world_size = 1, .num_blocks = 2, .num_threads = kNumThreads});
  grid.run(2 * static_cast<int>(cases.size()), launches);
  for (auto& one : launches.cases) one.check_all();
}

// The last list has work for every warp of both blocks, and a group that is not full.
const std::vector<std::vector<uint64_t>> kLists = {
    {}, {1}, {511}, {512}, {513}, {10'000}, {3, 512, 0, 1000, 1, 2048, 777, 3000, 4000}};

void check_dtype(DType dtype) {
  std::vector<BucketCase> cases;
  for (size_t wire = 0; wire < kNumDTypes; ++wire) {
    for (const bool is_scaled : {false, true}) {
      const WireFormat format{static_cast<DType>(wire), is_scaled};
      if (!cuda::with_bucket_formats(dtype, format, [](auto, auto) { return true; })) continue;
      for (const auto& lengths : kLists) {
        for (int variant = 0; variant < 4; ++variant) {
          cases.push_back({.dtype = dtype,
                           .wire = format,
                           .lengths = lengths,
                           .misalignment = cases.size() % 3 == 0 ? info(dtype).num_bytes : 0,
                           .is_stochastic = (variant & 1) != 0,
                           .has_residual = (variant & 2) != 0});
        }
      }
    }
  }
  pack_and_unpack(cases);
}

// One small case with a bit of everything, for mutants: both blocks have six groups, two more than
// they keep the sums of, and so one more for each warp.
void a_list_of_gradients_has_the_cpus_bits() {
  std::vector<uint64_t> lengths(10 * kTreeGroup, 1);
  lengths.insert(lengths.end(), kLists.back().begin(), kLists.back().end());
  pack_and_unpack(
      {{.dtype = DType::kFloat32, .wire = {DType::kFloat16, true}, .lengths = lengths}});
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

void squares_are_summed_in_the_fixed_tree() {
  struct Launches : PlainWork {
    std::vector<std::vector<double>> groups;
    std::vector<double> sums;

    int num_blocks(int) const { return 1; }
    void launch(const HostBlock& block, int, int number) {
      const auto place = static_cast<size_t>(number);
      const double sum = sum_in_fixed_tree(block, groups[place].data(), groups[place].size(),
                                           block.shared_doubles());
      if (block.thread() == 0) sums[place] = sum;
    }
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
    {"kernel_bucket-float32", check_dtype, DType::kFloat32},
    {"kernel_bucket-float64", check_dtype, DType::kFloat64},
    {"kernel_bucket-float16", check_dtype, DType::kFloat16},
    {"kernel_bucket-bfloat16", check_dtype, DType::kBFloat16},
};

}  // namespace
}  // namespace rota::test
