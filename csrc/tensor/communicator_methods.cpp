#include "tensor/communicator_methods.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "tensor/errors.h"
#include "tensor/options.h"
#include "tensor/python_arguments.h"
#include "tensor/signals.h"
#include "tensor/tensor_communicator.h"

namespace rota::tensors {
namespace {

namespace py = pybind11;

using OptionalDType = std::optional<at::ScalarType>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using CommunicatorClass = py::class_<TensorCommunicator, std::shared_ptr<TensorCommunicator>>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// ---- bound by hand; each struct is one method

PyObject* run_blocking(TensorCommunicator& communicator, const Operation& operation) {
  const py::gil_scoped_release gil_released;
  communicator.run(operation, Launch::kBlocking);
  return Py_None;
}

OrderOptions order_of(std::string_view collective, const PythonArguments& arguments, int group_size,
                      int order, int num_shards) {
  const bool is_default = !arguments.is_given(group_size) && !arguments.is_given(order) &&
                          !arguments.is_given(num_shards);
  if (is_default) return {};
  return parse_order(collective, arguments.text(order, "rank"), arguments.integer(group_size),
                     arguments.integer(num_shards));
}

struct AllReduce {
  enum {
    kTensor,
    kOp,
    kAlgorithm,
    kWireDtype,
    kHopDtype,
    kAsyncOp,
    kGroupSize,
    kOrder,
    kNumShards
  };
  static Signature signature() {
    return {"all_reduce",
            1,
            {"tensor", "op", "algorithm", "wire_dtype", "hop_dtype", "async_op", "group_size",
             "order", "num_shards"}};
  }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    const Operation operation{
        .kind = CollectiveKind::kAllReduce,
        .outputs = arguments.tensor(kTensor),
        .reduction = parse_all_reduce_options(
            arguments.text(kOp, "sum"), arguments.text(kAlgorithm, "auto"),
            arguments.dtype(kWireDtype), arguments.dtype(kHopDtype),
            order_of("all_reduce", arguments, kGroupSize, kOrder, kNumShards))};
    if (!arguments.flag(kAsyncOp)) return run_blocking(communicator, operation);
    WorkRef work;
    {
      const py::gil_scoped_release gil_released;
      work = communicator.run(operation, Launch::kAsync);
    }
    return py::cast(c10::intrusive_ptr<::c10d::Work>(std::move(work))).release().ptr();
  }
};

struct AllGather {
  enum { kOutput, kInput };
  static Signature signature() { return {"all_gather", 2, {"output", "input"}}; }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    return run_blocking(communicator, {.kind = CollectiveKind::kAllGather,
                                       .inputs = arguments.tensor(kInput),
                                       .outputs = arguments.tensor(kOutput)});
  }
};

struct ReduceScatter {
  enum { kOutput, kInput, kOp, kGroupSize, kOrder, kNumShards };
  static Signature signature() {
    return {"reduce_scatter", 2, {"output", "input", "op", "group_size", "order", "num_shards"}};
  }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    return run_blocking(communicator,
                        {.kind = CollectiveKind::kReduceScatter,
                         .inputs = arguments.tensor(kInput),
                         .outputs = arguments.tensor(kOutput),
                         .reduction = {.op = parse_op("reduce_scatter", arguments.text(kOp, "sum")),
                                       .order = order_of("reduce_scatter", arguments, kGroupSize,
                                                         kOrder, kNumShards)}});
  }
};

struct Broadcast {
  enum { kTensor, kRoot };
  static Signature signature() { return {"broadcast", 1, {"tensor", "root"}}; }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    return run_blocking(communicator, {.kind = CollectiveKind::kBroadcast,
                                       .outputs = arguments.tensor(kTensor),
                                       .root = arguments.rank(kRoot).value_or(0)});
  }
};

struct Send {
  enum { kTensor, kPeer, kTag };
  static Signature signature() { return {"send", 2, {"tensor", "peer", "tag"}}; }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    const at::Tensor& tensor = arguments.tensor(kTensor);
    const int peer = *arguments.rank(kPeer);
    const int64_t tag = arguments.integer(kTag).value_or(0);
    const py::gil_scoped_release gil_released;
    communicator.transfer(Direction::kSend, tensor, peer, tag, Launch::kBlocking);
    return Py_None;
  }
};

struct Recv {
  enum { kTensor, kPeer, kTag };
  static Signature signature() { return {"recv", 1, {"tensor", "peer", "tag"}}; }
  static PyObject* run(TensorCommunicator& communicator, const PythonArguments& arguments) {
    const at::Tensor& tensor = arguments.tensor(kTensor);
    const int peer = arguments.rank(kPeer).value_or(rota::kAnyRank);
    const int64_t tag = arguments.integer(kTag).value_or(0);
    int source = peer;
    {
      const py::gil_scoped_release gil_released;
      const WorkRef work =
          communicator.transfer(Direction::kRecv, tensor, peer, tag, Launch::kBlocking);
      if (work) source = work->sourceRank();
    }
    return PyLong_FromLong(source);
  }
};

TensorCommunicator& communicator_of(PyObject* self, const Signature& signature) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  void* communicator = instance->get_value_and_holder().value_ptr();
  if (communicator == nullptr) signature.refuse("Communicator.__init__ has not run");
  return *static_cast<TensorCommunicator*>(communicator);
}

// What CPython calls.
template <typename Method>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  try {
    return with_python_errors([&] {
      // Made at the first call, when Python is up.
      static const Signature signature = Method::signature();
      const PythonArguments arguments(signature, args, num_args, keywords);
      PyObject* result = Method::run(communicator_of(self, signature), arguments);
      if (result == Py_None) Py_INCREF(result);
      return result;
    });
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <typename Method>
PyMethodDef method(const char* name, const char* doc) {
  // CPython itself casts methods with keywords through void(*)().
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call<Method>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

// inspect and help() read the part before the dashes as the signature; rota/_C/__init__.pyi has the
// whole contract.
PyMethodDef methods[] = {
    method<AllReduce>(
        "all_reduce",
        "all_reduce($self, tensor, op='sum', algorithm='auto', wire_dtype=None, hop_dtype=None, "
        "async_op=False, group_size=None, order='rank', num_shards=None)\n--\n\nReduces tensor "
        "over all ranks, in place."),
    method<AllGather>(
        "all_gather",
        "all_gather($self, output, input)\n--\n\nConcatenates every rank's input into output."),
    method<ReduceScatter>("reduce_scatter",
                          "reduce_scatter($self, output, input, op='sum', group_size=None, "
                          "order='rank', num_shards=None)\n--\n\n"
                          "Reduces every rank's input; rank i gets part i of the result."),
    method<Broadcast>("broadcast",
                      "broadcast($self, tensor, root=0)\n--\n\nCopies rank root's tensor to all."),
    method<Send>("send", "send($self, tensor, peer, tag=0)\n--\n\nSends tensor to rank peer."),
    method<Recv>("recv",
                 "recv($self, tensor, peer=None, tag=0)\n--\n\n"
                 "Receives the next message from rank peer, or any, and returns its rank."),
};

void add_fast_methods(PyTypeObject* type) {
  for (PyMethodDef& definition : methods) {
    py::setattr(reinterpret_cast<PyObject*>(type), definition.ml_name,
                py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &definition)));
  }
}

// ---- bound by pybind11

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

BucketPass pass_of(float contribution_factor, float divisor, float result_factor,
                   const std::optional<at::Tensor>& residual,
                   std::optional<uint64_t> stochastic_seed) {
  return {.contribution_factor = contribution_factor,
          .divisor = divisor,
          .result_factor = result_factor,
          .has_residual = residual.has_value(),
          .stochastic_seed = stochastic_seed};
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
        pass_of(contribution_factor, divisor, result_factor, residual, stochastic_seed), algorithm,
        parse_order("reduce_bucket", order, group_size, num_shards));
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

}  // namespace

void bind_communicator(py::module_& module) {
  CommunicatorClass communicator(module, "Communicator");
  add_fast_methods(reinterpret_cast<PyTypeObject*>(communicator.ptr()));
  communicator
      .def(py::init([](const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, size_t slot_bytes,
                       ChooseEngine choose_engine, OptionalDType inter_wire_dtype,
                       bool inter_block_scaling, std::function<void()> check_peers,
                       std::function<std::string(int)> why_ended) {
             return TensorCommunicator::make(
                 store, rank, world_size, timeout,
                 {.slot_bytes = slot_bytes,
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
            return WorkPtr(self.transfer(Direction::kSend, tensor, peer, tag, Launch::kAsync));
          },
          py::arg("tensor"), py::arg("peer"), py::arg("tag") = 0, ReleaseGil())
      .def(
          "irecv",
          [](TensorCommunicator& self, const at::Tensor& tensor, std::optional<int> peer,
             int64_t tag) {
            return WorkPtr(self.transfer(Direction::kRecv, tensor, peer.value_or(kAnyRank), tag,
                                         Launch::kAsync));
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

  communicator
      .def(
          "reduce_shards_future",
          [](TensorCommunicator& self, const std::shared_ptr<ShardedBucket>& shards,
             const at::Tensor& bucket, const at::Tensor& stats, at::ScalarType wire_dtype,
             bool block_scaling, float contribution_factor, float divisor, float result_factor,
             const std::optional<at::Tensor>& residual, std::optional<uint64_t> stochastic_seed,
             std::string_view order, std::optional<int64_t> num_shards) {
            const auto options = parse_bucket_options(
                wire_dtype, block_scaling,
                pass_of(contribution_factor, divisor, result_factor, residual, stochastic_seed),
                "auto", parse_order("reduce_shards", order, std::nullopt, num_shards));
            const WorkRef work =
                self.reduce_shards(shards, {bucket, stats, residual}, options, Launch::kAsync);
            return std::make_shared<torch::jit::PythonFutureWrapper>(work->hook_future());
          },
          py::arg("shards"), py::arg("bucket"), py::arg("stats"), py::kw_only(),
          py::arg("wire_dtype"), py::arg("block_scaling"), py::arg("contribution_factor") = 1.0f,
          py::arg("divisor") = 1.0f, py::arg("result_factor") = 1.0f,
          py::arg("residual") = py::none(), py::arg("stochastic_seed") = py::none(),
          py::arg("order") = "rank", py::arg("num_shards") = py::none(), ReleaseGil())
      .def(
          "update_shards",
          [](TensorCommunicator& self, const std::shared_ptr<ShardedBucket>& shards,
             const cpu::UpdateSteps& steps) { self.update_shards(shards, steps); },
          py::arg("shards"), py::arg("steps"), ReleaseGil());

  module.def(
      "failed_future",
      [](const py::object& error) {
        py::set_error(py::type::of(error), error);
        auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        future->setError(std::make_exception_ptr(py::error_already_set()));
        return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
      },
      py::arg("error"));
}

}  // namespace rota::tensors
