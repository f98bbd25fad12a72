// Python bindings, without logic; python/rota/_C/ documents them.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "base/build_id.h"
#include "base/wire_format.h"
#include "bindings.h"
#include "c10d/process_group.h"
#include "cpu/element_loops.h"
#include "cuda/device_info.h"
#include "schedule/chunk.h"
#include "schedule/cost.h"
#include "schedule/direct.h"
#include "schedule/rank_set.h"
#include "schedule/ring.h"
#include "schedule/select.h"
#include "schedule/tuning.h"
#include "tensor/errors.h"
#include "tensor/fast_methods.h"
#include "tensor/gpu_classes.h"
#include "tensor/gpu_self_test.h"
#include "tensor/heap_pool.h"
#include "tensor/heap_tensor.h"
#include "tensor/options.h"
#include "tensor/signals.h"
#include "tensor/tensor_checks.h"
#include "tensor/tensor_communicator.h"
#include "tensor/thread_state.h"
#include "transport/available_memory.h"
#include "transport/host_id.h"
#include "transport/numa_node.h"

namespace py = pybind11;

namespace {

using namespace rota::tensors;  // NOLINT: this file is a list of its names
using rota::CollectiveKind;
using rota::c10d_backend::Delegate;
using rota::c10d_backend::ProcessGroupRota;
using rota::c10d_backend::WorkPtr;
namespace schedule = rota::schedule;

using rota::c10d_backend::StorePtr;
using OptionalDType = std::optional<at::ScalarType>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using CommunicatorClass = py::class_<TensorCommunicator, std::shared_ptr<TensorCommunicator>>;

void bind_schedule(py::module_ module) {
  py::class_<schedule::Range>(module, "Range")
      .def_readonly("begin", &schedule::Range::begin)
      .def_readonly("num_elems", &schedule::Range::num_elems);
  py::class_<schedule::RingStep>(module, "RingStep")
      .def_readonly("send_shard", &schedule::RingStep::send_shard)
      .def_readonly("recv_shard", &schedule::RingStep::recv_shard)
      .def_readonly("action", &schedule::RingStep::action);
  py::enum_<schedule::RingAction>(module, "RingAction")
      .value("REDUCE", schedule::RingAction::kReduce)
      .value("FINISH", schedule::RingAction::kFinish)
      .value("COPY", schedule::RingAction::kCopy);
  py::class_<schedule::OrderedRingStep>(module, "OrderedRingStep")
      .def_readonly("partial_chunk", &schedule::OrderedRingStep::partial_chunk)
      .def_readonly("result_chunk", &schedule::OrderedRingStep::result_chunk);
  py::class_<schedule::RankSet>(module, "RankSet")
      .def_readonly("num_ranks", &schedule::RankSet::num_ranks)
      .def("rank_at", &schedule::RankSet::rank_at)
      .def("place_of", &schedule::RankSet::place_of);
  py::class_<schedule::TwoShotStep>(module, "TwoShotStep")
      .def_readonly("contribute_round", &schedule::TwoShotStep::contribute_round)
      .def_readonly("reduce_round", &schedule::TwoShotStep::reduce_round);
  module.def("even_shard", &schedule::even_shard);
  module.def("chunk_of", &schedule::chunk_of);
  module.def("num_chunks_of_shards", &schedule::num_chunks_of_shards);
  module.def("chunk_of_even_shard", &schedule::chunk_of_even_shard);
  module.def("next_rank", &schedule::next_rank);
  module.def("previous_rank", &schedule::previous_rank);
  module.def("rotated_peer", &schedule::rotated_peer);
  module.def("ring_num_steps", &schedule::ring_num_steps);
  module.def("ring_step", &schedule::ring_step);
  module.def("everyone", &schedule::everyone);
  module.def("group_of", &schedule::group_of);
  py::class_<schedule::TreeNode>(module, "TreeNode")
      .def_readonly("first_shard", &schedule::TreeNode::first_shard)
      .def_readonly("num_shards", &schedule::TreeNode::num_shards);
  module.def("shards_of", &schedule::shards_of);
  module.def("across_groups", &schedule::across_groups);
  module.def("ordered_ring_num_steps", &schedule::ordered_ring_num_steps);
  module.def("ordered_ring_step", &schedule::ordered_ring_step);
  module.def("two_shot_num_steps", &schedule::two_shot_num_steps);
  module.def("two_shot_step", &schedule::two_shot_step);
  module.def("select", [](int world_size, uint64_t num_wire_bytes) {
    return schedule::name(schedule::select(world_size, num_wire_bytes));
  });
}

void bind_cost(py::module_ module) {
  py::class_<schedule::Cost>(module, "Cost")
      .def_readonly("links_out_bytes", &schedule::Cost::links_out_bytes)
      .def_readonly("links_in_bytes", &schedule::Cost::links_in_bytes)
      .def_readonly("memory_read_bytes", &schedule::Cost::memory_read_bytes)
      .def_readonly("memory_written_bytes", &schedule::Cost::memory_written_bytes)
      .def_readonly("memory_bytes_of_all", &schedule::Cost::memory_bytes_of_all)
      .def_readonly("num_messages", &schedule::Cost::num_messages)
      .def_readonly("num_waits", &schedule::Cost::num_waits);
  module.attr("COST_NAMES") = py::tuple(py::cast(schedule::kCostNames));
  module.def("cost", &cost, py::arg("what"), py::kw_only(), py::arg("tensor"), py::arg("wire"),
             py::arg("hop"), py::arg("world_size"), py::arg("group_size") = 1);
}

void bind_tuning(py::module_& module) {
  using schedule::Tuning;
  py::class_<Tuning>(module, "GpuTuning")
      .def(py::init<const Tuning&>(), py::arg("other"))
      .def_readwrite("max_low_latency_bytes", &Tuning::max_low_latency_bytes)
      .def_readwrite("max_one_shot_bytes", &Tuning::max_one_shot_bytes)
      .def_readwrite("num_channels", &Tuning::num_channels)
      .def_readwrite("slot_bytes", &Tuning::slot_bytes)
      .def_readwrite("free_chunk_bytes", &Tuning::free_chunk_bytes)
      .def_readwrite("free_threads", &Tuning::free_threads)
      .def_readonly("provenance", &Tuning::provenance);
  module.def("gpu_tuning", &gpu_tuning, py::arg("gpu"), py::arg("topology"), py::arg("world_size"));
}

void bind_gpu_self_test(py::module_ module) {
  py::class_<KernelReport>(module, "KernelReport")
      .def_readonly("kernel", &KernelReport::kernel)
      .def_readonly("num_formats", &KernelReport::num_formats)
      .def_readonly("findings", &KernelReport::findings)
      .def_readonly("milliseconds", &KernelReport::milliseconds);
  module.def(
      "gpu_self_test",
      [](int device) { return with_python_errors([&] { return run_gpu_self_test(device); }); },
      py::arg("device"), ReleaseGil());
  module.def(
      "recorded_gpu_self_test",
      [](int device) { return with_python_errors([&] { return recorded_gpu_self_test(device); }); },
      py::arg("device"), ReleaseGil());
  module.def(
      "gpu_driver",
      [](int device) {
        return with_python_errors([&] { return rota::cuda::gpu_info(device).driver; });
      },
      py::arg("device"), ReleaseGil());
}

// The ranks of each host.
std::vector<std::vector<int>> hosts_of(TensorCommunicator& communicator) {
  const py::gil_scoped_release gil_released;
  const schedule::Hosts& hosts = communicator.hosts();
  std::vector<std::vector<int>> ranks;
  for (int host = 0; host < hosts.num_hosts(); ++host) ranks.push_back(hosts.ranks_of(host));
  return ranks;
}

// The ranks of each NUMA node; empty if nodes are no level of sums.
std::vector<std::vector<int>> numa_nodes_of(TensorCommunicator& communicator) {
  const py::gil_scoped_release gil_released;
  const int node_size = communicator.node_size();
  std::vector<std::vector<int>> ranks;
  for (int rank = 0; node_size != 0 && rank < communicator.world_size(); ++rank) {
    if (rank % node_size == 0) ranks.emplace_back();
    ranks.back().push_back(rank);
  }
  return ranks;
}

void run(TensorCommunicator& communicator, const Operation& operation) {
  communicator.run(operation, Launch::kBlocking);
}

at::TensorList list_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? at::TensorList(*tensor) : at::TensorList();
}

// Both ways to call reduce_bucket, blocking and with a future. The .pyi documents the arguments.
template <typename Finish>
auto reduce_bucket_call(Launch mode, Finish finish) {
  return [=](TensorCommunicator& self, const at::Tensor& bucket, const at::Tensor& stats,
             at::ScalarType wire_dtype, bool block_scaling, float contribution_factor,
             float divisor, float result_factor, const std::optional<at::Tensor>& residual,
             std::optional<uint64_t> stochastic_seed, std::string_view algorithm,
             std::optional<int64_t> group_size, std::string_view order,
             std::optional<int64_t> num_shards) {
    const auto options = parse_bucket_options(
        wire_dtype, block_scaling,
        {.contribution_factor = contribution_factor,
         .divisor = divisor,
         .result_factor = result_factor,
         .has_residual = residual.has_value(),
         .stochastic_seed = stochastic_seed},
        algorithm, parse_order("reduce_bucket", order, group_size, num_shards));
    return finish(self.reduce_bucket({bucket, stats, residual}, options, mode));
  };
}

void bind_reduce_bucket(CommunicatorClass& communicator, const char* name, auto call) {
  communicator.def(name, call, py::arg("bucket"), py::arg("stats"), py::kw_only(),
                   py::arg("wire_dtype"), py::arg("block_scaling"),
                   py::arg("contribution_factor") = 1.0f, py::arg("divisor") = 1.0f,
                   py::arg("result_factor") = 1.0f, py::arg("residual") = py::none(),
                   py::arg("stochastic_seed") = py::none(), py::arg("algorithm") = "auto",
                   py::arg("group_size") = py::none(), py::arg("order") = "rank",
                   py::arg("num_shards") = py::none(), ReleaseGil());
}

// The values that every `algorithm` argument accepts.
py::tuple algorithm_names() {
  std::vector<std::string_view> names{"auto"};
  names.insert(names.end(), schedule::kAlgorithmNames.begin(), schedule::kAlgorithmNames.end());
  return py::tuple(py::cast(names));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // registers Store, Work and Backend
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&TensorCommunicator::end_progress_of_all));
  keep_progress_thread_states();

  py::module_ schedule_module = module.def_submodule("schedule");
  bind_schedule(schedule_module);
  bind_cost(schedule_module);
  bind_tuning(module);
  module.attr("ALGORITHMS") = algorithm_names();
  module.attr("BUCKET_DTYPES") = py::tuple(py::cast(dtype_names(rota::is_bucket_dtype)));
  module.attr("WIRE_DTYPES") = py::tuple(py::cast(dtype_names(rota::is_wire_dtype)));
  module.attr("BLOCK_SCALED_DTYPES") = py::tuple(py::cast(dtype_names(rota::has_block_scaling)));
  module.def("host_id", [] { return with_python_errors(rota::transport::host_id); });
  module.def("numa_node",
             [] { return with_python_errors([] { return rota::transport::numa_node().number; }); });
  module.def("available_memory", &rota::transport::available_memory);
  module.def(
      "make_heap_tensor",
      [](const std::vector<int64_t>& size, at::ScalarType dtype) {
        return with_python_errors([&] { return rota::tensors::make_heap_tensor(size, dtype); });
      },
      py::arg("size"), py::arg("dtype"), ReleaseGil());
  py::class_<HeapPool>(module, "HeapPool")
      .def(py::init<>())
      .def(
          "empty",
          [](HeapPool& self, int64_t num_elems, at::ScalarType dtype) {
            return with_python_errors([&] { return self.empty(num_elems, dtype); });
          },
          py::arg("num_elems"), py::arg("dtype"), ReleaseGil());
  module.def(
      "check_messages_apart",
      [](const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) {
        std::vector<Operation> messages;
        for (const at::Tensor& tensor : sent) {
          messages.push_back({.kind = CollectiveKind::kSendRecv, .inputs = tensor});
        }
        for (const at::Tensor& tensor : received) {
          messages.push_back({.kind = CollectiveKind::kSendRecv, .outputs = tensor});
        }
        with_python_errors([&] { check_apart(messages); });
      },
      py::arg("sent"), py::arg("received"), ReleaseGil());
  module.def("block_elems", &block_elems, py::arg("wire_dtype"));
  module.def("isa", [] { return rota::cpu::element_loops().isa; });
  module.def("cuda_archs", &rota::cuda::archs);
  module.def("cuda_devices", [] { return with_python_errors(rota::cuda::devices); });
  module.def("build_id", &rota::build_id);
  bind_gpu_self_test(module);
  bind_windows(module);

  CommunicatorClass communicator(module, "Communicator");
  add_fast_methods(reinterpret_cast<PyTypeObject*>(communicator.ptr()));
  communicator
      .def(py::init([](const StorePtr& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, size_t slot_bytes,
                       ChooseEngine choose_engine, OptionalDType inter_wire_dtype,
                       bool inter_block_scaling, std::function<void()> check_peers,
                       std::function<std::string(int)> why_ended) {
             return TensorCommunicator::make(
                 store, rank, world_size,
                 {.timeout = timeout,
                  .slot_bytes = slot_bytes,
                  .check_interrupt = check_python_signals,
                  .check_peers = std::move(check_peers),
                  .why_ended = std::move(why_ended),
                  .choose_engine = std::move(choose_engine),
                  .inter_wire = parse_inter_wire(inter_wire_dtype, inter_block_scaling)});
           }),
           py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"),
           py::arg("slot_bytes"), py::arg("choose_engine") = py::none(),
           py::arg("inter_wire_dtype") = py::none(), py::arg("inter_block_scaling") = false,
           py::arg("check_peers") = py::none(), py::arg("why_ended") = py::none(), ReleaseGil())
      .def_property_readonly("rank", &TensorCommunicator::rank)
      .def_property_readonly("world_size", &TensorCommunicator::world_size)
      .def_property_readonly("hosts", &hosts_of)
      .def_property_readonly("numa_nodes", &numa_nodes_of)
      .def_property_readonly("num_hosts",
                             [](TensorCommunicator& self) { return hosts_of(self).size(); })
      .def(
          "all_reduce_future",
          [](TensorCommunicator& self, const at::Tensor& tensor, std::string_view op,
             OptionalDType wire_dtype) {
            const Operation operation{
                .kind = CollectiveKind::kAllReduce,
                .outputs = tensor,
                .reduction = parse_all_reduce_options(op, "auto", wire_dtype)};
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.run(operation, Launch::kAsync)->hook_future());
          },
          py::arg("tensor"), py::arg("op"), py::arg("wire_dtype"), ReleaseGil())
      .def(
          "reduce",
          [](TensorCommunicator& self, const at::Tensor& tensor, int root, std::string_view op,
             std::optional<int64_t> group_size, std::string_view order,
             std::optional<int64_t> num_shards) {
            run(self,
                {.kind = CollectiveKind::kReduce,
                 .outputs = tensor,
                 .root = root,
                 .reduction = {.op = parse_op("reduce", op),
                               .order = parse_order("reduce", order, group_size, num_shards)}});
          },
          py::arg("tensor"), py::arg("root") = 0, py::arg("op") = "sum",
          py::arg("group_size") = py::none(), py::arg("order") = "rank",
          py::arg("num_shards") = py::none(), ReleaseGil())
      .def(
          "gather",
          [](TensorCommunicator& self, const std::optional<at::Tensor>& output,
             const at::Tensor& input, int root) {
            run(self, {.kind = CollectiveKind::kGather,
                       .inputs = input,
                       .outputs = list_of(output),
                       .root = root});
          },
          py::arg("output"), py::arg("input"), py::arg("root") = 0, ReleaseGil())
      .def(
          "scatter",
          [](TensorCommunicator& self, const at::Tensor& output,
             const std::optional<at::Tensor>& input, int root) {
            run(self, {.kind = CollectiveKind::kScatter,
                       .inputs = list_of(input),
                       .outputs = output,
                       .root = root});
          },
          py::arg("output"), py::arg("input"), py::arg("root") = 0, ReleaseGil())
      .def(
          "all_to_all",
          [](TensorCommunicator& self, const at::Tensor& output, const at::Tensor& input,
             const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
            run(self, {.kind = CollectiveKind::kAllToAll,
                       .inputs = input,
                       .outputs = output,
                       .input_splits = input_splits,
                       .output_splits = output_splits});
          },
          py::arg("output"), py::arg("input"), py::kw_only(),
          py::arg("output_splits") = std::vector<int64_t>(),
          py::arg("input_splits") = std::vector<int64_t>(), ReleaseGil())
      .def(
          "isend",
          [](TensorCommunicator& self, const at::Tensor& tensor, int peer, int64_t tag) {
            return WorkPtr(self.send(tensor, peer, tag, Launch::kAsync));
          },
          py::arg("tensor"), py::arg("peer"), py::arg("tag") = 0, ReleaseGil())
      .def(
          "irecv",
          [](TensorCommunicator& self, const at::Tensor& tensor, std::optional<int> peer,
             int64_t tag) {
            return WorkPtr(self.recv(tensor, peer.value_or(rota::kAnyRank), tag, Launch::kAsync));
          },
          py::arg("tensor"), py::arg("peer") = py::none(), py::arg("tag") = 0, ReleaseGil())
      .def(
          "barrier",
          [](TensorCommunicator& self) { run(self, {.kind = CollectiveKind::kBarrier}); },
          ReleaseGil())
      .def("connect_device", &TensorCommunicator::connect_device, py::arg("device"), ReleaseGil())
      .def_property_readonly("peer_access", &TensorCommunicator::peer_access)
      .def("check_results", &TensorCommunicator::check_results, ReleaseGil())
      .def("abort", &TensorCommunicator::abort, py::arg("reason"), ReleaseGil())
      .def_property_readonly(
          "has_failed", [](const TensorCommunicator& self) { return self.failure().has_value(); })
      .def("close", &TensorCommunicator::close, ReleaseGil());

  bind_reduce_bucket(communicator, "reduce_bucket",
                     reduce_bucket_call(Launch::kBlocking, [](const WorkRef&) {}));
  bind_reduce_bucket(
      communicator, "reduce_bucket_future",
      reduce_bucket_call(Launch::kAsync, [](const WorkRef& work) {
        return std::make_shared<torch::jit::PythonFutureWrapper>(work->hook_future());
      }));

  add_gpu_classes(module);

  using rota::c10d_backend::BackendOptions;
  const py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>>(module, "BackendOptions",
                                                                 backend.attr("Options"))
      .def(py::init([](std::chrono::milliseconds timeout, size_t slot_bytes,
                       OptionalDType wire_dtype, std::string_view order,
                       std::optional<int64_t> num_shards, OptionalDType inter_wire_dtype,
                       bool inter_block_scaling) {
             auto options = c10::make_intrusive<BackendOptions>(
                 timeout, slot_bytes, wire_dtype,
                 parse_order("BackendOptions", order, std::nullopt, num_shards),
                 parse_inter_wire(inter_wire_dtype, inter_block_scaling));
             options->check_interrupt = check_python_signals;
             return options;
           }),
           py::arg("timeout"), py::arg("slot_bytes"), py::arg("wire_dtype"), py::arg("order"),
           py::arg("num_shards"), py::arg("inter_wire_dtype"), py::arg("inter_block_scaling"))
      .def_readonly("slot_bytes", &BackendOptions::slot_bytes)
      .def_readonly("wire_dtype", &BackendOptions::wire_dtype)
      .def_readwrite("connects_at_first_use", &BackendOptions::connects_at_first_use)
      .def_readwrite("choose_engine", &BackendOptions::choose_engine)
      .def_readwrite("check_peers", &BackendOptions::check_peers)
      .def_readwrite("why_ended", &BackendOptions::why_ended)
      .def_readwrite("watch_block", &BackendOptions::watch_block)
      .def("__deepcopy__", [](const BackendOptions& self, const py::object&) {
        return c10::make_intrusive<BackendOptions>(self);
      });
  py::class_<ProcessGroupRota, c10::intrusive_ptr<ProcessGroupRota>>(module, "ProcessGroupRota",
                                                                     backend)
      .def(py::init([](const StorePtr& store, int rank, int world_size,
                       ProcessGroupRota::OptionsPtr options, Delegate::Make make_delegate,
                       rota::c10d_backend::MakeWindow make_window,
                       decltype(ProcessGroupRota::Membership::handle) handle,
                       decltype(ProcessGroupRota::Membership::reconfigure) reconfigure) {
             std::optional<ProcessGroupRota::Membership> membership;
             if (reconfigure) membership = {std::move(handle), std::move(reconfigure)};
             return c10::make_intrusive<ProcessGroupRota>(
                 store, rank, world_size, std::move(options), std::move(make_delegate),
                 std::move(make_window), std::move(membership));
           }),
           py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("options"),
           py::arg("make_delegate"), py::arg("make_window"), py::arg("handle") = py::none(),
           py::arg("reconfigure") = py::none(), ReleaseGil())
      .def_property_readonly("options", &ProcessGroupRota::getBackendOptions)
      .def(
          "spans_hosts",
          [](ProcessGroupRota& self, const std::vector<int>& ranks) {
            return self.communicator().spans_hosts(ranks);
          },
          py::arg("ranks"))
      .def(
          "why_ended",
          [](ProcessGroupRota& self, int rank) { return self.communicator().why_ended(rank); },
          py::arg("rank"), ReleaseGil())
      .def(
          "all_gather_in",
          [](ProcessGroupRota& self, at::ScalarType wire_dtype, bool block_scaling,
             const at::Tensor& output, const at::Tensor& input, bool async_op) {
            const auto wire = parse_wire("all_gather", wire_dtype, block_scaling);
            return self.all_gather_in(output, input, wire, async_op);
          },
          py::arg("wire_dtype"), py::arg("block_scaling"), py::arg("output"), py::arg("input"),
          py::arg("async_op"), ReleaseGil())
      .def(
          "reduce_scatter_in",
          [](ProcessGroupRota& self, at::ScalarType wire_dtype, const at::Tensor& output,
             const at::Tensor& input, const ::c10d::ReduceOp& op, bool async_op) {
            const auto wire = parse_wire("reduce_scatter", wire_dtype, /*block_scaling=*/false);
            return self.reduce_scatter_in(output, input, op, wire.dtype, async_op);
          },
          py::arg("wire_dtype"), py::arg("output"), py::arg("input"), py::arg("op"),
          py::arg("async_op"), ReleaseGil())
      .def(
          "check_results", [](ProcessGroupRota& self) { self.communicator().check_results(); },
          ReleaseGil())
      .def(
          "abort",
          [](ProcessGroupRota& self, const std::optional<std::string>& reason) {
            if (reason) {
              self.communicator().abort(*reason);
            } else {
              self.abort();
            }
          },
          py::arg("reason") = py::none(), ReleaseGil())
      .def("get_error", &ProcessGroupRota::getError)
      // torch calls it on ranks outside of a new group if the default one is bound to a device.
      .def("perform_nocolor_split", [](ProcessGroupRota&, at::Device) {}, py::arg("device"));
}
