#include "tensor/fast_methods.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "tensor/errors.h"
#include "tensor/options.h"
#include "tensor/python_arguments.h"
#include "tensor/tensor_communicator.h"

namespace rota::tensors {
namespace {

namespace py = pybind11;

// Each is one method.

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
    communicator.send(tensor, peer, tag, Launch::kBlocking);
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
      const WorkRef work = communicator.recv(tensor, peer, tag, Launch::kBlocking);
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

}  // namespace

void add_fast_methods(PyTypeObject* type) {
  for (PyMethodDef& definition : methods) {
    py::setattr(reinterpret_cast<PyObject*>(type), definition.ml_name,
                py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &definition)));
  }
}

}  // namespace rota::tensors
