#include <pybind11/chrono.h>

#include <bit>
#include <set>

#include "base/timeout.h"
#include "tensor/cuda/gpu_classes.h"
#include "tensor/cuda/local_ranks.h"
#include "tensor/gil.h"
#include "tensor/options.h"
#include "tensor/tensor_checks.h"
#include "transport/gpu_identity.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse_group(const std::string& what) {
  throw Error(ErrorKind::kValue, "rota.LocalGroup: " + what);
}

struct LocalGroupOptions {
  int world_size;
  at::Device device;
  std::optional<int> num_channels;  // none: the tuning's
  std::chrono::milliseconds timeout;
  std::optional<schedule::Tuning> tuning;  // none: the table's
};

schedule::Tuning tuning_for(const LocalGroupOptions& options) {
  if (options.world_size < 2 || options.world_size > kMaxLocalRanks) {
    refuse_group(join("world_size is ", options.world_size, ", expected 2 to ", kMaxLocalRanks));
  }
  if (!options.device.is_cuda() || !options.device.has_index()) {
    refuse_group(
        join("device is ", options.device.str(), ", expected a CUDA device with its index"));
  }
  if (options.tuning) {
    cuda::check_tuning(*options.tuning);
    return *options.tuning;
  }
  const transport::GpuIdentity gpu = transport::identity_of_gpu(options.device.index());
  return *schedule::find_tuning(gpu.name, schedule::Topology::kLocal, options.world_size);
}

transport::DeviceGeometry make_geometry(const LocalGroupOptions& options,
                                        const schedule::Tuning& tuning) {
  const c10::DeviceGuard on_device(options.device);
  if (!cuda::starts_grids_as_a_whole()) {
    refuse_group(
        join(options.device.str(),
             " takes no cooperative launches, expected a GPU that does: the ranks' blocks wait for "
             "each other; use another GPU, or one process for each rank"));
  }
  // A spinning block occupies its multiprocessor, so there is one for each, all ranks together.
  const int most_channels = cuda::num_multiprocessors() / options.world_size;
  int tuned_channels = tuning.num_channels == 0 ? most_channels : tuning.num_channels;
  // The row may be for a larger GPU whose name starts the same way.
  if (!options.tuning) tuned_channels = std::min(tuned_channels, most_channels);
  const int num_channels = options.num_channels.value_or(tuned_channels);
  if (num_channels < 1 || num_channels > most_channels) {
    refuse_group(join("num_channels is ", num_channels, ", expected 1 to ", most_channels, ": ",
                      options.world_size, " ranks share ", cuda::num_multiprocessors(),
                      " multiprocessors, and all blocks of all ranks must run at the same time"));
  }
  return cuda::geometry_of(options.world_size, num_channels, tuning);
}

cuda::Kernel parse_kernel(std::string_view algorithm) {
  using cuda::Kernel;
  std::string expected = "auto";
  for (const Kernel kernel :
       {Kernel::kLowLatency, Kernel::kOneShot, Kernel::kTwoShot, Kernel::kTwoShotInPlace,
        Kernel::kOrderedRing, Kernel::kRing, Kernel::kHierarchical}) {
    if (cuda::name(kernel) == algorithm) return kernel;
    expected += join(", ", cuda::name(kernel));
  }
  refuse_group(join("algorithm is '", algorithm, "', expected one of ", expected));
}

bool has_nan(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

std::array<void*, kMaxLocalRanks> data_of(const Tensors& tensors) {
  std::array<void*, kMaxLocalRanks> data{};
  for (size_t rank = 0; rank < tensors.size(); ++rank) data[rank] = tensors[rank].data_ptr();
  return data;
}

// What moves bytes of floats or others from the inputs to the outputs, whose length counts.
cuda::LaunchRequest moving(cuda::Kernel kernel, const Tensors& inputs, const Tensors& outputs) {
  return {.kernel = kernel,
          .input = data_of(inputs),
          .output = data_of(outputs),
          .num_elems = num_bytes(outputs[0]),
          .format = cuda::kBytes,
          .moves_floats = has_nan(outputs[0])};
}

// For trying and measuring collectives without several GPUs or processes. Tensors are listed by
// rank: contiguous, of one length and dtype, on the group's device. Work is queued on the current
// stream. All throw Error.
class LocalGroup {
 public:
  // Allocates memory and waits for that.
  explicit LocalGroup(const LocalGroupOptions& options)
      : options_(options),
        tuning_(tuning_for(options)),
        geometry_(make_geometry(options, tuning_)) {
    const c10::DeviceGuard on_device(options_.device);
    cuda::load_kernels();
    ranks_.emplace(options_.device, tuning_, geometry_, options_.timeout);
  }

  int world_size() const { return options_.world_size; }
  int num_channels() const { return geometry_.num_channels; }
  at::Device device() const { return options_.device; }

  void all_reduce(const Tensors& tensors, std::string_view op, std::string_view algorithm,
                  std::optional<int> group_size, std::string_view order) {
    check(tensors, "all_reduce");
    const WireFormat format{reducible_dtype(tensors[0].scalar_type(), "all_reduce")};
    const auto num_elems = static_cast<uint64_t>(tensors[0].numel());
    const ReduceOp reduce_op = parse_op("all_reduce", op);
    const cuda::Kernel kernel =
        algorithm == "auto" ? choose(format.num_bytes(num_elems)) : parse_kernel(algorithm);
    cuda::MappedTensors mapped{};
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      mapped.of[rank] = static_cast<std::byte*>(tensors[rank].data_ptr());
    }
    cuda::LaunchRequest request{.kernel = kernel,
                                .input = data_of(tensors),
                                .output = data_of(tensors),
                                .num_elems = num_elems,
                                .format = format,
                                .op = reduce_op,
                                .divisor = static_cast<double>(world_size()),
                                .tensors = &mapped};
    set_order(request, "all_reduce", group_size, order);
    ranks_->run(request);
  }

  void reduce_scatter(const Tensors& outputs, const Tensors& inputs, std::string_view op,
                      std::optional<int> group_size, std::string_view order) {
    check(outputs, "reduce_scatter");
    check(inputs, "reduce_scatter");
    if (inputs[0].numel() != outputs[0].numel() * world_size() ||
        inputs[0].scalar_type() != outputs[0].scalar_type()) {
      refuse_group(join("reduce_scatter from ", inputs[0].numel(), " elements to ",
                        outputs[0].numel(), ", expected ", world_size(),
                        " times as many, of one dtype"));
    }
    cuda::LaunchRequest request{
        .kernel = cuda::Kernel::kReduceScatter,
        .input = data_of(inputs),
        .output = data_of(outputs),
        .num_elems = static_cast<uint64_t>(inputs[0].numel()),
        .format = {reducible_dtype(inputs[0].scalar_type(), "reduce_scatter")},
        .op = parse_op("reduce_scatter", op),
        .divisor = static_cast<double>(world_size())};
    set_order(request, "reduce_scatter", group_size, order);
    ranks_->run(request);
  }

  void all_gather(const Tensors& outputs, const Tensors& inputs) {
    check(outputs, "all_gather");
    check(inputs, "all_gather");
    if (num_bytes(outputs[0]) != num_bytes(inputs[0]) * static_cast<uint64_t>(world_size())) {
      refuse_group(join("all_gather from ", num_bytes(inputs[0]), " bytes to ",
                        num_bytes(outputs[0]), ", expected ", world_size(), " times as many"));
    }
    ranks_->run(moving(cuda::Kernel::kAllGather, inputs, outputs));
  }

  void broadcast(const Tensors& tensors, int root) {
    check(tensors, "broadcast");
    cuda::LaunchRequest request = moving(cuda::Kernel::kBroadcast, tensors, tensors);
    request.source = root;
    ranks_->run(request);
  }

  // Copies rank src's tensor to rank dst's; the others do not change.
  void send_recv(int src, int dst, const Tensors& tensors) {
    check(tensors, "send_recv");
    for (const int rank : {src, dst}) {
      if (rank < 0 || rank >= world_size() || src == dst) {
        refuse_group(join("send_recv from rank ", src, " to rank ", dst,
                          ", expected two ranks in [0, ", world_size(), ")"));
      }
    }
    cuda::LaunchRequest request = moving(cuda::Kernel::kTransfer, tensors, tensors);
    request.source = src;
    request.destination = dst;
    ranks_->run(request);
  }

 private:
  // Throws also if an earlier collective has failed.
  void check(const Tensors& tensors, std::string_view collective) const {
    const auto failure = ranks_->failure();
    if (failure) {
      throw Error(ErrorKind::kTimeout,
                  join("rota.", collective, ": rank ", failure->rank, " of the local group waited ",
                       options_.timeout.count(), " ms for rank ", failure->peer,
                       " in an earlier collective, whose results are not valid; make a new group"));
    }
    if (tensors.size() != static_cast<size_t>(world_size())) {
      refuse_group(join(collective, " got ", tensors.size(), " tensors, expected one for each of ",
                        world_size(), " ranks"));
    }
    std::set<const void*> places;
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      const at::Tensor& tensor = tensors[rank];
      check_tensor(tensor, collective, options_.device);
      if (tensor.numel() != 0 && !places.insert(tensor.data_ptr()).second) {
        refuse_group(join(collective, ": the tensor of rank ", rank,
                          " is also that of another rank; give each its own"));
      }
      if (!tensor.is_contiguous()) {
        refuse_group(join(collective, ": the tensor of rank ", rank,
                          " is not contiguous; call contiguous()"));
      }
      if (tensor.numel() != tensors[0].numel() ||
          tensor.scalar_type() != tensors[0].scalar_type()) {
        refuse_group(join(collective, ": the tensor of rank ", rank, " has ", tensor.numel(),
                          " elements of ", c10::toString(tensor.scalar_type()), ", that of rank 0 ",
                          tensors[0].numel(), " of ", c10::toString(tensors[0].scalar_type())));
      }
    }
  }

  // The kernel for algorithm "auto". num_bytes: of each rank's tensor.
  cuda::Kernel choose(uint64_t num_bytes) const {
    const schedule::Algorithm algorithm = schedule::select_on_gpu(
        tuning_, world_size(), num_bytes, cuda::most_packet_bytes(geometry_));
    // All tensors are mapped, so two_shot_in_place moves nothing twice. It also sums in groups.
    if (algorithm == schedule::Algorithm::kTwoShot) return cuda::Kernel::kTwoShotInPlace;
    return cuda::kernel_for(algorithm);
  }

  // The request has its kernel and format. order: "rank", within which there may be groups, or
  // "tree".
  void set_order(cuda::LaunchRequest& request, std::string_view collective,
                 std::optional<int> group_size, std::string_view order) const {
    if (!parse_order(collective, order, group_size, std::nullopt).is_tree) {
      request.group_size = group_size.value_or(0);
      return;
    }
    if (group_size) refuse_group("order='tree' knows no group_size; leave one of them out");
    const uint32_t num_shards = std::bit_ceil(static_cast<uint32_t>(world_size()));
    cuda::set_order(request, {.num_shards = num_shards}, world_size());
  }

  LocalGroupOptions options_;
  schedule::Tuning tuning_;
  transport::DeviceGeometry geometry_;
  std::optional<LocalRanks> ranks_;
};

}  // namespace

void add_local_group(py::module_& module) {
  using Holder = std::unique_ptr<LocalGroup, DeleteWithoutGil>;
  py::class_<LocalGroup, Holder>(module, "LocalGroup")
      .def(py::init([](int world_size, at::Device device, std::optional<int> num_channels,
                       std::chrono::milliseconds timeout,
                       const std::optional<schedule::Tuning>& tuning) {
             return Holder(new LocalGroup({.world_size = world_size,
                                           .device = device,
                                           .num_channels = num_channels,
                                           .timeout = usable_timeout(timeout),
                                           .tuning = tuning}));
           }),
           py::arg("world_size"), py::arg("device"), py::arg("num_channels"), py::arg("timeout"),
           py::arg("tuning"), ReleaseGil())
      .def_property_readonly("world_size", &LocalGroup::world_size)
      .def_property_readonly("num_channels", &LocalGroup::num_channels)
      .def_property_readonly("device", &LocalGroup::device)
      .def("all_reduce", &LocalGroup::all_reduce, py::arg("tensors"), py::arg("op") = "sum",
           py::arg("algorithm") = "auto", py::arg("group_size") = py::none(),
           py::arg("order") = "rank", ReleaseGil())
      .def("reduce_scatter", &LocalGroup::reduce_scatter, py::arg("outputs"), py::arg("inputs"),
           py::arg("op") = "sum", py::arg("group_size") = py::none(), py::arg("order") = "rank",
           ReleaseGil())
      .def("all_gather", &LocalGroup::all_gather, py::arg("outputs"), py::arg("inputs"),
           ReleaseGil())
      .def("broadcast", &LocalGroup::broadcast, py::arg("tensors"), py::arg("root") = 0,
           ReleaseGil())
      .def("send_recv", &LocalGroup::send_recv, py::arg("src"), py::arg("dst"), py::arg("tensors"),
           ReleaseGil());
}

}  // namespace rota::tensors
