// Names for Python, no logic. python/rota/_C.pyi documents what stands here.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "c10d/all_reduce_method.h"
#include "c10d/errors.h"
#include "c10d/gpu_classes.h"
#include "c10d/process_group.h"
#include "c10d/tensor_checks.h"
#include "c10d/tensor_communicator.h"
#include "cpu/element_loops.h"
#include "cuda/device_info.h"
#include "schedule/chunk.h"
#include "schedule/cost.h"
#include "schedule/direct.h"
#include "schedule/rank_set.h"
#include "schedule/ring.h"
#include "schedule/select.h"
#include "transport/bootstrap.h"

namespace py = pybind11;

namespace {

using namespace rota::c10d_glue;  // NOLINT: this file is a list of its names
namespace schedule = rota::schedule;

using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using OptionalDType = std::optional<at::ScalarType>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using CommunicatorClass = py::class_<TensorCommunicator, std::shared_ptr<TensorCommunicator>>;

void check_python_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

TensorCommunicatorOptions make_options(std::chrono::milliseconds timeout, size_t slot_bytes) {
  return {.timeout = timeout, .slot_bytes = slot_bytes, .check_interrupt = check_python_signals};
}

void bind_schedule(py::module_ module) {
  py::class_<schedule::Range>(module, "Range")
      .def_readonly("begin", &schedule::Range::begin)
      .def_readonly("num_elems", &schedule::Range::num_elems);
  py::class_<schedule::RingStep>(module, "RingStep")
      .def_readonly("send_piece", &schedule::RingStep::send_piece)
      .def_readonly("recv_piece", &schedule::RingStep::recv_piece)
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
  module.def("piece_of", &schedule::piece_of);
  module.def("chunk_of", &schedule::chunk_of);
  module.def("num_chunks_of_pieces", &schedule::num_chunks_of_pieces);
  module.def("chunk_of_piece", &schedule::chunk_of_piece);
  module.def("next_rank", &schedule::next_rank);
  module.def("previous_rank", &schedule::previous_rank);
  module.def("rotated_peer", &schedule::rotated_peer);
  module.def("ring_num_steps", &schedule::ring_num_steps);
  module.def("ring_step", &schedule::ring_step);
  module.def("everyone", &schedule::everyone);
  module.def("group_of", &schedule::group_of);
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
  using rota::WireFormat;
  py::class_<WireFormat>(module, "WireFormat")
      .def(py::init([](at::ScalarType dtype, bool is_block_scaled) {
             return WireFormat{reducible_dtype(dtype, "dtype"), is_block_scaled};
           }),
           py::arg("dtype"), py::arg("is_block_scaled") = false)
      .def("num_bytes", &WireFormat::num_bytes);
  py::class_<schedule::Message>(module, "Message")
      .def(py::init<uint64_t, WireFormat, WireFormat, WireFormat, uint64_t, uint64_t>(),
           py::kw_only(), py::arg("num_elems"), py::arg("tensor"), py::arg("wire"), py::arg("hop"),
           py::arg("slot_bytes"), py::arg("granule_elems"));
  py::class_<schedule::Cost>(module, "Cost")
      .def_readonly("sent_bytes", &schedule::Cost::sent_bytes)
      .def_readonly("received_bytes", &schedule::Cost::received_bytes)
      .def_readonly("read_from_peers_bytes", &schedule::Cost::read_from_peers_bytes)
      .def_readonly("read_by_peers_bytes", &schedule::Cost::read_by_peers_bytes)
      .def_readonly("hbm_read_bytes", &schedule::Cost::hbm_read_bytes)
      .def_readonly("hbm_written_bytes", &schedule::Cost::hbm_written_bytes)
      .def_readonly("num_messages", &schedule::Cost::num_messages)
      .def_readonly("waits_in_a_row", &schedule::Cost::waits_in_a_row);
  module.def("one_shot_cost", &schedule::one_shot_cost);
  module.def("low_latency_cost", &schedule::low_latency_cost);
  module.def("two_shot_cost", &schedule::two_shot_cost);
  module.def("two_shot_in_place_cost", &schedule::two_shot_in_place_cost);
  module.def("ring_cost", &schedule::ring_cost);
  module.def("ordered_ring_cost", &schedule::ordered_ring_cost);
  module.def("hierarchical_cost", &schedule::hierarchical_cost);
  module.def("reduce_scatter_cost", &schedule::reduce_scatter_cost);
  module.def("all_gather_cost", &schedule::all_gather_cost);
  module.def("broadcast_cost", &schedule::broadcast_cost);
  module.def("send_cost", &schedule::send_cost);
  module.def("recv_cost", &schedule::recv_cost);
  module.def("pack_cost", &schedule::pack_cost);
  module.def("unpack_cost", &schedule::unpack_cost);
}

// Both ways to call reduce_bucket; the arguments are those of the .pyi.
template <typename Finish>
auto reduce_bucket_call(Launch mode, Finish finish) {
  return [=](TensorCommunicator& self, const at::Tensor& bucket, const at::Tensor& stats,
             at::ScalarType wire_dtype, bool block_scaling, float contribution_factor,
             float divisor, float result_factor, const std::optional<at::Tensor>& residual,
             std::optional<uint64_t> stochastic_seed, std::string_view algorithm) {
    const auto options = BucketOptions::parse(stats, wire_dtype, block_scaling,
                                              {.contribution_factor = contribution_factor,
                                               .divisor = divisor,
                                               .result_factor = result_factor,
                                               .stochastic_seed = stochastic_seed},
                                              residual, algorithm);
    return finish(self.reduce_bucket(bucket, options, mode));
  };
}

void bind_reduce_bucket(CommunicatorClass& communicator, const char* name, auto call) {
  communicator.def(
      name, call, py::arg("bucket"), py::arg("stats"), py::kw_only(), py::arg("wire_dtype"),
      py::arg("block_scaling"), py::arg("contribution_factor") = 1.0f, py::arg("divisor") = 1.0f,
      py::arg("result_factor") = 1.0f, py::arg("residual") = py::none(),
      py::arg("stochastic_seed") = py::none(), py::arg("algorithm") = "auto", ReleaseGil());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // registers Store, Work and Backend
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&TensorCommunicator::end_progress_of_all));

  py::module_ schedule_module = module.def_submodule("schedule");
  bind_schedule(schedule_module);
  bind_cost(schedule_module);
  module.def("host_id", &rota::transport::host_id);
  module.def("block_elems", &block_elems, py::arg("wire_dtype"));
  module.def("isa", [] { return rota::cpu::element_loops().isa; });
  module.def("cuda_archs", &rota::cuda::archs);
  module.def("cuda_devices", [] { return with_python_errors(rota::cuda::devices); });

  CommunicatorClass communicator(module, "Communicator");
  add_all_reduce_method(reinterpret_cast<PyTypeObject*>(communicator.ptr()));
  communicator
      .def(py::init([](const StorePtr& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, size_t slot_bytes) {
             return TensorCommunicator::connect(store, rank, world_size,
                                                make_options(timeout, slot_bytes));
           }),
           py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"),
           py::arg("slot_bytes"), ReleaseGil())
      .def_property_readonly("rank", &TensorCommunicator::rank)
      .def_property_readonly("world_size", &TensorCommunicator::world_size)
      .def(
          "all_reduce_future",
          [](TensorCommunicator& self, const at::Tensor& tensor, std::string_view op,
             OptionalDType wire_dtype) {
            const auto options = AllReduceOptions::parse(op, "auto", wire_dtype, std::nullopt);
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.all_reduce(tensor, options, Launch::kAsync)->hook_future());
          },
          py::arg("tensor"), py::arg("op"), py::arg("wire_dtype"), ReleaseGil())
      .def(
          "broadcast",
          [](TensorCommunicator& self, const at::Tensor& tensor, int root) {
            self.broadcast(tensor, root, Launch::kBlocking);
          },
          py::arg("tensor"), py::arg("root") = 0, ReleaseGil())
      .def(
          "all_gather",
          [](TensorCommunicator& self, const at::Tensor& output, const at::Tensor& input) {
            self.all_gather({self.split_by_rank(output, input)}, Launch::kBlocking);
          },
          py::arg("output"), py::arg("input"), ReleaseGil())
      .def(
          "send",
          [](TensorCommunicator& self, const at::Tensor& tensor, int peer) {
            self.send(tensor, peer, Launch::kBlocking);
          },
          py::arg("tensor"), py::arg("peer"), ReleaseGil())
      .def(
          "recv",
          [](TensorCommunicator& self, const at::Tensor& tensor, int peer) {
            self.receive(tensor, peer, Launch::kBlocking);
          },
          py::arg("tensor"), py::arg("peer"), ReleaseGil())
      .def(
          "reduce_scatter",
          [](TensorCommunicator& self, const at::Tensor& output, const at::Tensor& input,
             std::string_view op) {
            const auto options = AllReduceOptions::parse(op, "auto", std::nullopt, std::nullopt);
            self.reduce_scatter(output, input, options.op, Launch::kBlocking);
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", ReleaseGil())
      .def(
          "barrier", [](TensorCommunicator& self) { self.barrier(Launch::kBlocking); },
          ReleaseGil())
      .def("connect_device", &TensorCommunicator::connect_device, py::arg("device"), ReleaseGil())
      .def_property_readonly("device_means", &TensorCommunicator::device_means)
      .def("abort", &TensorCommunicator::abort, py::arg("reason"), ReleaseGil())
      .def("close", &TensorCommunicator::close, ReleaseGil());

  bind_reduce_bucket(communicator, "reduce_bucket",
                     reduce_bucket_call(Launch::kBlocking, [](const WorkRef&) {}));
  bind_reduce_bucket(
      communicator, "reduce_bucket_future",
      reduce_bucket_call(Launch::kAsync, [](const WorkRef& work) {
        return std::make_shared<torch::jit::PythonFutureWrapper>(work->hook_future());
      }));

  add_gpu_classes(module);

  const py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<ProcessGroupRota, c10::intrusive_ptr<ProcessGroupRota>>(module, "ProcessGroupRota",
                                                                     backend)
      .def(py::init([](const StorePtr& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, size_t slot_bytes,
                       ProcessGroupRota::MakeDelegate make_delegate) {
             return c10::make_intrusive<ProcessGroupRota>(store, rank, world_size,
                                                          make_options(timeout, slot_bytes),
                                                          std::move(make_delegate));
           }),
           py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"),
           py::arg("slot_bytes"), py::arg("make_delegate"), ReleaseGil());
}
