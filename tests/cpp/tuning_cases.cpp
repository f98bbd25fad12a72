// Tunings: which are refused, which row of the table a GPU gets, and what a row decides.
#include "schedule/tuning.h"

#include "check.h"
#include "launch_requests.h"

namespace rota::test {
namespace {

using cuda::Kernel;
using cuda::LaunchRequest;

void tunings_that_no_kernel_could_work_by_are_refused() {
  cuda::check_tuning(kTuning);
  const auto refuses = [](const auto& change, std::initializer_list<std::string_view> words) {
    schedule::Tuning tuning = kTuning;
    change(tuning);
    expect_error(ErrorKind::kValue, [&] { cuda::check_tuning(tuning); }, words);
  };
  using schedule::Tuning;
  refuses([](Tuning& tuning) { tuning.num_channels = -1; }, {"num_channels is -1", "0"});
  for (const int threads : {-32, 0, 48, 544}) {
    refuses([&](Tuning& tuning) { tuning.free_threads = threads; },
            {"free_threads", std::to_string(threads), "a multiple of 32", "512"});
  }
  for (const size_t num_bytes : {size_t{0}, size_t{2048}, size_t{8200}, size_t{1} << 31}) {
    refuses([&](Tuning& tuning) { tuning.slot_bytes = num_bytes; },
            {"slot_bytes", std::to_string(num_bytes), "a multiple of 128", "4096"});
    refuses([&](Tuning& tuning) { tuning.free_chunk_bytes = num_bytes; },
            {"free_chunk_bytes", std::to_string(num_bytes), "a multiple of 128", "4096"});
  }
}

void every_row_of_the_table_is_taken() {
  for (const schedule::TuningRow& row : schedule::kTunings) {
    cuda::check_tuning(row.tuning);
    check(!row.tuning.provenance.empty(), "a row says where it comes from");
  }
}

// The smallest tuning that check_tuning() accepts has room for what any kernel moves at once.
void least_slots_and_chunks_take_every_dtype() {
  schedule::Tuning tuning = kTuning;
  tuning.slot_bytes = tuning.free_chunk_bytes = 4096;
  cuda::check_tuning(tuning);
  cuda::Peers peers = good_peers();
  peers.geometry.slot_bytes = tuning.slot_bytes;
  for (const Kernel kernel : {Kernel::kOrderedRing, Kernel::kHierarchical, Kernel::kTwoShot}) {
    for (size_t i = 0; i < kNumDTypes; ++i) {
      LaunchRequest request = good_request(kernel);
      request.format = {static_cast<DType>(i)};
      if (!is_defined(ReduceOp::kSum, request.format.dtype)) continue;
      request.is_bucket = is_wire_dtype(request.format.dtype);
      check(cuda::plan_launch(request, peers, tuning).args.chunk_elems > 0, "a slot");
      cuda::MappedTensors tensors{};
      LaunchRequest in_place = mapped_request(tensors);
      in_place.format = request.format;
      in_place.is_bucket = request.is_bucket;
      check(cuda::plan_launch(in_place, local_peers(), tuning).args.chunk_elems > 0, "a chunk");
    }
  }
}

constexpr schedule::TuningRow row(std::string_view gpu, schedule::Topology topology,
                                  int max_world_size, int num_channels) {
  return {gpu, topology, max_world_size, {.num_channels = num_channels}};
}

void the_row_that_fits_closest_is_found() {
  using schedule::Topology;
  // Deliberately not sorted.
  constexpr schedule::TuningRow kRows[] = {row("", Topology::kNvlink, 64, 1),
                                           row("NVIDIA H200", Topology::kNvlink, 8, 2),
                                           row("NVIDIA H200", Topology::kNvlink, 2, 3),
                                           row("NVIDIA H200 NVL", Topology::kNvlink, 4, 4),
                                           row("", Topology::kNvlink, 2, 5),
                                           row("NVIDIA H200", Topology::kPcie, 8, 6)};
  const auto found = [&](std::string_view gpu, Topology topology, int world_size) {
    const auto tuning = schedule::find_tuning(gpu, topology, world_size, kRows);
    return tuning ? tuning->num_channels : 0;
  };
  check_equal(found("NVIDIA H200", Topology::kNvlink, 2), 3, "fewest ranks of that GPU");
  check_equal(found("NVIDIA H200", Topology::kNvlink, 3), 2, "more ranks of that GPU");
  check_equal(found("NVIDIA H200", Topology::kNvlink, 9), 1, "more than its rows have");
  check_equal(found("NVIDIA H200 NVL", Topology::kNvlink, 2), 4, "the longest name");
  check_equal(found("NVIDIA H200 NVL", Topology::kNvlink, 5), 2, "the next longest name");
  check_equal(found("NVIDIA H200", Topology::kPcie, 2), 6, "its topology");
  check_equal(found("NVIDIA H20", Topology::kNvlink, 2), 5, "any GPU, few ranks");
  check_equal(found("", Topology::kNvlink, 64), 1, "any GPU");
  check_equal(found("", Topology::kPcie, 2), 0, "none");
  check_equal(found("", Topology::kNvlink, 65), 0, "too many ranks");
  check_equal(found("", Topology::kNvlink, 0), 0, "no ranks");
}

void ranks_of_different_gpus_have_the_general_row() {
  using schedule::GpuPlace, schedule::Topology;
  const auto common = [](std::initializer_list<GpuPlace> places) {
    const GpuPlace place = schedule::common_place({places.begin(), places.size()});
    return join(place.gpu, ' ', name(place.topology));
  };
  const GpuPlace h200{"H200", Topology::kNvlink}, h200_apart{"H200", Topology::kPcie},
      a100{"A100", Topology::kNvlink};
  check_equal(common({h200, h200, h200}), std::string("H200 nvlink"), "all alike");
  check_equal(common({h200, h200, a100}), std::string(" nvlink"), "another GPU last");
  check_equal(common({a100, h200, h200}), std::string(" nvlink"), "another GPU first");
  check_equal(common({h200, h200_apart, h200}), std::string("H200 pcie"), "one without NVLink");
}

void a_tuning_says_which_all_reduce_runs() {
  using schedule::Algorithm;
  const auto selects = [](uint64_t num_bytes, Algorithm expected, uint64_t most_packet_bytes) {
    check_equal(name(schedule::select_on_gpu(kTuning, 4, num_bytes, most_packet_bytes)),
                name(expected), join(num_bytes, " bytes"));
  };
  selects(4096, Algorithm::kLowLatency, 1 << 20);
  selects(4096, Algorithm::kLowLatency, 4096);
  selects(4096, Algorithm::kOneShot, 4095);
  selects(4097, Algorithm::kTwoShot, 1 << 20);
  selects(4096 * 4, Algorithm::kTwoShot, 1 << 20);
  // What local ranks run instead (tensor/cuda/local_group.cpp) has no waits between ranks.
  for (const uint64_t num_bytes : {1, 4096, 1 << 20}) {
    check_equal(name(schedule::select_on_gpu(schedule::kLocalTuning, 2, num_bytes, 1 << 20)),
                name(Algorithm::kTwoShot), "of local ranks");
  }
}

const CaseTable kCases{
    {"launch_wrong_tunings", tunings_that_no_kernel_could_work_by_are_refused},
    {"launch_table", every_row_of_the_table_is_taken},
    {"launch_least_tuning", least_slots_and_chunks_take_every_dtype},
    {"launch_closest_row", the_row_that_fits_closest_is_found},
    {"launch_common_row", ranks_of_different_gpus_have_the_general_row},
    {"launch_selection", a_tuning_says_which_all_reduce_runs},
};

}  // namespace
}  // namespace rota::test
