// Python bindings, without logic; python/rota/_C/ documents them.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "base/build_id.h"
#include "base/exact_sum.h"
#include "base/wire_format.h"
#include "c10d/process_group.h"
#include "cpu/element_loops.h"
#include "cuda/device_info.h"
#include "schedule/chunk.h"
#include "schedule/cost.h"
#include "schedule/direct.h"
#include "schedule/pieces.h"
#include "schedule/rank_set.h"
#include "schedule/ring.h"
#include "schedule/select.h"
#include "schedule/tuning.h"
#include "tensor/communicator_methods.h"
#include "tensor/errors.h"
#include "tensor/gil.h"
#include "tensor/gpus.h"
#include "tensor/heap_tensor.h"
#include "tensor/hosts/torch_connections.h"
#include "tensor/options.h"
#include "tensor/sharded_bucket.h"
#include "tensor/signals.h"
#include "tensor/stored_bytes.h"
#include "tensor/tensor_checks.h"
#include "tensor/tensor_communicator.h"
#include "tensor/thread_state.h"
#include "tensor/window.h"
#include "transport/available_memory.h"
#include "transport/place.h"

namespace py = pybind11;

namespace {

using namespace rota::tensors;  // NOLINT: this file is a list of its names
using rota::c10d_backend::ProcessGroupRota;
namespace schedule = rota::schedule;

using rota::c10d_backend::StorePtr;
using OptionalDType = std::optional<at::ScalarType>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

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
  module.def("gpu_self_test", &run_gpu_self_test, py::arg("device"), ReleaseGil());
  module.def("recorded_gpu_self_test", &recorded_gpu_self_test, py::arg("device"), ReleaseGil());
  module.def(
      "gpu_driver", [](int device) { return rota::cuda::gpu_info(device).driver; },
      py::arg("device"), ReleaseGil());
}

void bind_windows(py::module_ module) {
  py::class_<ExposedTensor, std::shared_ptr<ExposedTensor>>(module, "ExposedTensor")
      .def(py::init(&ExposedTensor::make), py::arg("tensor"), py::arg("num_words"),
           py::arg("others_may_write"), py::kw_only(), py::arg("torch_holds_it") = false,
           ReleaseGil())
      .def_property_readonly("tensor", &ExposedTensor::tensor)
      .def_property_readonly("address", &ExposedTensor::address)
      .def("load", &ExposedTensor::load, py::arg("word"))
      .def("publish", &ExposedTensor::publish, py::arg("word"), py::arg("value"), ReleaseGil())
      .def("close", &ExposedTensor::close, ReleaseGil());

  py::class_<OpenedTensor, std::shared_ptr<OpenedTensor>>(module, "OpenedTensor")
      .def(py::init<const std::string&, std::string, Milliseconds>(), py::arg("address"),
           py::arg("who"), py::arg("timeout"), ReleaseGil())
      .def_property_readonly("pid", &OpenedTensor::pid)
      .def_property_readonly("is_open", &OpenedTensor::is_open)
      .def_property_readonly("bytes", &OpenedTensor::bytes)
      .def("load", &OpenedTensor::load, py::arg("word"))
      .def("wait", &OpenedTensor::wait, py::arg("word"), py::arg("value"), py::arg("timeout"),
           ReleaseGil());

  using rota::hosts::WindowService;
  py::class_<WindowService, std::shared_ptr<WindowService>>(module, "WindowService")
      .def(py::init(
               [](BackendPtr backend, const std::vector<std::string>& hosts, int rank, int number) {
                 auto service = std::make_unique<WindowService>(
                     std::make_shared<TorchConnections>(std::move(backend)), schedule::Hosts(hosts),
                     rank, number);
                 // A forked child has a copy, but none of its threads, nor of the engine's: both
                 // would be waited for.
                 return std::shared_ptr<WindowService>(
                     service.release(), [generation = rota::fork_generation()](WindowService* old) {
                       const GilReleased gil_released;
                       if (generation == rota::fork_generation()) delete old;
                     });
               }),
           py::arg("backend"), py::arg("hosts"), py::arg("rank"), py::arg("number"), ReleaseGil())
      .def_property_readonly("is_usable", &WindowService::is_usable);

  py::class_<TensorWindow, std::shared_ptr<TensorWindow>>(module, "Window")
      .def(py::init<std::shared_ptr<ExposedTensor>, int,
                    const std::vector<std::shared_ptr<OpenedTensor>>&, int, Milliseconds,
                    std::shared_ptr<WindowService>, uint64_t>(),
           py::arg("own"), py::arg("rank"), py::arg("others"), py::arg("num_channels"),
           py::arg("timeout"), py::arg("service") = py::none(), py::arg("number") = 0, ReleaseGil())
      .def_property_readonly("rank", &TensorWindow::rank)
      .def_property_readonly("world_size", &TensorWindow::world_size)
      .def("put", &TensorWindow::put, py::arg("tensor"), py::arg("rank"), py::arg("offset") = 0,
           ReleaseGil())
      .def("get", &TensorWindow::get, py::arg("tensor"), py::arg("rank"), py::arg("offset") = 0,
           ReleaseGil())
      .def(
          "accumulate",
          [](TensorWindow& self, const at::Tensor& tensor, int rank, int64_t offset,
             std::optional<at::ScalarType> wire_dtype, std::optional<bool> block_scaling) {
            std::optional<rota::WireFormat> wire;
            if (wire_dtype) wire = parse_wire("Window.accumulate", *wire_dtype, block_scaling);
            self.accumulate(tensor, rank, offset, wire);
          },
          py::arg("tensor"), py::arg("rank"), py::arg("offset") = 0,
          py::arg("wire_dtype") = py::none(), py::arg("block_scaling") = py::none(), ReleaseGil())
      .def("view", &TensorWindow::view, py::arg("rank"), ReleaseGil())
      .def("signal", &TensorWindow::signal, py::arg("rank"), py::arg("channel") = 0, ReleaseGil())
      .def("wait_signal", &TensorWindow::wait_signal, py::arg("rank"), py::arg("channel") = 0,
           py::arg("timeout") = py::none(), ReleaseGil())
      .def("wait_any_signal", &TensorWindow::wait_any_signal, py::arg("ranks"),
           py::arg("channel") = 0, py::arg("timeout") = py::none(), ReleaseGil())
      .def("num_signals", &TensorWindow::num_signals, py::arg("rank"), py::arg("channel") = 0,
           ReleaseGil())
      .def("is_alive", &TensorWindow::is_alive, py::arg("rank"), ReleaseGil())
      .def("close", &TensorWindow::close, ReleaseGil());

  module.def("move_storage", &move_storage, py::arg("tensor"), py::arg("place"), py::kw_only(),
             py::arg("copies"), ReleaseGil());
  module.def("checksum", &checksum, py::arg("tensor"), ReleaseGil());
  module.def("copy_with_checksum", &copy_with_checksum, py::arg("dst"), py::arg("src"),
             ReleaseGil());
  const auto parse = [](at::ScalarType wire_dtype, bool block_scaling) {
    return parse_wire("encode", wire_dtype, block_scaling);
  };
  module.def(
      "encoded_bytes",
      [parse](int64_t num_elems, at::ScalarType wire_dtype, bool block_scaling) {
        return encoded_bytes(num_elems, parse(wire_dtype, block_scaling));
      },
      py::arg("num_elems"), py::arg("wire_dtype"), py::arg("block_scaling"));
  module.def(
      "encode",
      [parse](const at::Tensor& bytes, const at::Tensor& values, at::ScalarType wire_dtype,
              bool block_scaling) { encode(bytes, values, parse(wire_dtype, block_scaling)); },
      py::arg("bytes"), py::arg("values"), py::arg("wire_dtype"), py::arg("block_scaling"),
      ReleaseGil());
  module.def(
      "decode",
      [parse](const at::Tensor& values, const at::Tensor& bytes, at::ScalarType wire_dtype,
              bool block_scaling) { decode(values, bytes, parse(wire_dtype, block_scaling)); },
      py::arg("values"), py::arg("bytes"), py::arg("wire_dtype"), py::arg("block_scaling"),
      ReleaseGil());
}

// Applies to what torch's own classes call of this module, too.
void translate_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const rota::Error& error) {
    torch::translate_exception_to_python(std::make_exception_ptr(PythonError(error)));
  }
}

void bind_sharded_buckets(py::module_& module) {
  using rota::cpu::UpdateStep;
  py::class_<UpdateStep>(module, "UpdateStep")
      .def(py::init([](bool is_adam, float gradient_factor, float l2, float kept, float size,
                       float momentum, float fresh, float beta2, float fresh_square,
                       float correction, float eps, bool is_nesterov, bool is_first) {
             return UpdateStep{is_adam ? UpdateStep::Kind::kAdam : UpdateStep::Kind::kSgd,
                               gradient_factor,
                               l2,
                               kept,
                               size,
                               momentum,
                               fresh,
                               beta2,
                               fresh_square,
                               correction,
                               eps,
                               is_nesterov,
                               is_first};
           }),
           py::kw_only(), py::arg("is_adam"), py::arg("gradient_factor") = 1.0f,
           py::arg("l2") = 0.0f, py::arg("kept") = 1.0f, py::arg("size"),
           py::arg("momentum") = 0.0f, py::arg("fresh") = 1.0f, py::arg("beta2") = 0.0f,
           py::arg("fresh_square") = 0.0f, py::arg("correction") = 1.0f, py::arg("eps") = 0.0f,
           py::arg("is_nesterov") = false, py::arg("is_first") = false);
  using OptionalTensor = std::optional<at::Tensor>;
  py::class_<ShardedBucket, std::shared_ptr<ShardedBucket>>(module, "ShardedBucket")
      .def(py::init<std::vector<at::Tensor>, const at::Tensor&, int, int>(), py::arg("parameters"),
           py::arg("pieces"), py::arg("rank"), py::arg("world_size"))
      .def(
          "set_state",
          [](ShardedBucket& self, size_t piece, const OptionalTensor& parameters,
             const OptionalTensor& momentum, const OptionalTensor& squares,
             const OptionalTensor& largest) {
            self.set_state(piece, {parameters, momentum, squares, largest});
          },
          py::arg("piece"), py::kw_only(), py::arg("parameters") = py::none(),
          py::arg("momentum") = py::none(), py::arg("squares") = py::none(),
          py::arg("largest") = py::none())
      .def_property_readonly("sums", &ShardedBucket::sums);
  module.attr("LEAF_ELEMS") = schedule::kLeafElems;
  module.attr("TILE_ELEMS") = rota::kTileElems;
  module.attr("SHARD_STATS") = 1 + rota::ExactSum::kNumWords;
  module.attr("SQUARES_UNIT_EXPONENT") = rota::ExactSum::kUnitExponent;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // registers Store, Work and Backend
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&TensorCommunicator::end_progress_of_all));
  keep_progress_thread_states();
  py::register_exception_translator(&translate_error);

  py::module_ schedule_module = module.def_submodule("schedule");
  bind_schedule(schedule_module);
  bind_cost(schedule_module);
  bind_tuning(module);
  // The values that every `algorithm` argument accepts.
  std::vector<std::string_view> algorithms{"auto"};
  algorithms.insert(algorithms.end(), schedule::kAlgorithmNames.begin(),
                    schedule::kAlgorithmNames.end());
  module.attr("ALGORITHMS") = py::tuple(py::cast(algorithms));
  module.attr("BUCKET_DTYPES") = py::tuple(py::cast(dtype_names(rota::is_bucket_dtype)));
  module.attr("WIRE_DTYPES") = py::tuple(py::cast(dtype_names(rota::is_wire_dtype)));
  module.attr("BLOCK_SCALED_DTYPES") = py::tuple(py::cast(dtype_names(rota::has_block_scaling)));
  module.def("host_id", &rota::transport::host_id);
  module.def("numa_node", [] { return rota::transport::numa_node().number; });
  module.def("available_memory", &rota::transport::available_memory);
  module.def("make_heap_tensor", &make_heap_tensor, py::arg("size"), py::arg("dtype"),
             ReleaseGil());
  py::class_<HeapPool>(module, "HeapPool")
      .def(py::init<>())
      .def("empty", &HeapPool::empty, py::arg("num_elems"), py::arg("dtype"), ReleaseGil());
  module.def(
      "check_messages_apart",
      [](const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) {
        check_messages_apart(sent, received);
      },
      py::arg("sent"), py::arg("received"), ReleaseGil());
  module.def("block_elems", &block_elems, py::arg("wire_dtype"));
  module.def("isa", [] { return rota::cpu::element_loops().isa; });
  module.def("cuda_archs", &rota::cuda::archs);
  module.def("cuda_devices", &rota::cuda::devices);
  module.def("build_id", &rota::build_id);
  bind_gpu_self_test(module);
  bind_windows(module);

  bind_sharded_buckets(module);
  bind_communicator(module);
  add_gpu_classes(module);

  using rota::c10d_backend::BackendOptions;
  const py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>>(module, "BackendOptions",
                                                                 backend.attr("Options"))
      .def(py::init([](std::chrono::milliseconds timeout, size_t slot_bytes,
                       OptionalDType wire_dtype, std::string_view order,
                       std::optional<int64_t> num_shards, OptionalDType inter_wire_dtype,
                       bool inter_block_scaling) {
             return c10::make_intrusive<BackendOptions>(
                 timeout,
                 TensorCommunicatorOptions{
                     .slot_bytes = slot_bytes,
                     .check_interrupt = check_python_signals,
                     .inter_wire = parse_inter_wire(inter_wire_dtype, inter_block_scaling)},
                 wire_dtype, parse_order("BackendOptions", order, std::nullopt, num_shards));
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
                       ProcessGroupRota::OptionsPtr options,
                       ProcessGroupRota::MakeDelegate make_delegate,
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
