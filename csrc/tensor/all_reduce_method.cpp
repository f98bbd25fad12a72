#include "tensor/all_reduce_method.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "tensor/errors.h"
#include "tensor/options.h"
#include "tensor/tensor_communicator.h"

namespace rota::tensors {
namespace {

namespace py = pybind11;

enum Parameter {
  kTensor,
  kOp,
  kAlgorithm,
  kWireDtype,
  kHopDtype,
  kAsyncOp,
  kGroupSize,
  kNumParameters
};
constexpr std::array<const char*, kNumParameters> kNames = {
    "tensor", "op", "algorithm", "wire_dtype", "hop_dtype", "async_op", "group_size"};

using Arguments = std::array<PyObject*, kNumParameters>;  // borrowed; null where left out

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::kType, "rota.all_reduce: " + what);
}

[[noreturn]] void refuse(Parameter parameter, const char* expected, PyObject* argument) {
  refuse(
      join(kNames[parameter], " is of type ", Py_TYPE(argument)->tp_name, ", expected ", expected));
}

// Python passes keywords as interned strings, so most comparisons are of pointers.
Parameter parameter_named(PyObject* keyword) {
  static const Arguments interned = [] {
    Arguments strings;
    for (int i = 0; i < kNumParameters; ++i) strings[i] = PyUnicode_InternFromString(kNames[i]);
    return strings;
  }();
  for (int i = 0; i < kNumParameters; ++i) {
    if (keyword == interned[i]) return static_cast<Parameter>(i);
  }
  for (int i = 0; i < kNumParameters; ++i) {
    if (PyUnicode_Compare(keyword, interned[i]) == 0) return static_cast<Parameter>(i);
  }
  refuse(join("unknown keyword argument ", py::repr(keyword).cast<std::string>()));
}

// Binds arguments as Python does: positional ones first, then keywords, whose values follow in
// `args`.
Arguments bind(PyObject* const* args, Py_ssize_t num_positional, PyObject* keywords) {
  if (num_positional > kNumParameters) {
    refuse(join(num_positional, " arguments, expected at most ", int{kNumParameters}));
  }
  Arguments bound{};
  std::copy_n(args, num_positional, bound.begin());
  const Py_ssize_t num_keywords = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    const Parameter parameter = parameter_named(PyTuple_GET_ITEM(keywords, i));
    if (bound[parameter] != nullptr) refuse(join(kNames[parameter], " is given twice"));
    bound[parameter] = args[num_positional + i];
  }
  if (bound[kTensor] == nullptr) refuse("no tensor is given");
  return bound;
}

std::string_view text(const Arguments& arguments, Parameter parameter,
                      std::string_view default_text) {
  PyObject* argument = arguments[parameter];
  if (argument == nullptr) return default_text;
  if (!PyUnicode_Check(argument)) refuse(parameter, "str", argument);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(argument, &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

std::optional<at::ScalarType> dtype(const Arguments& arguments, Parameter parameter) {
  PyObject* argument = arguments[parameter];
  if (argument == nullptr || argument == Py_None) return std::nullopt;
  if (!THPDtype_Check(argument)) refuse(parameter, "torch.dtype or None", argument);
  return reinterpret_cast<THPDtype*>(argument)->scalar_type;
}

std::optional<int64_t> integer(const Arguments& arguments, Parameter parameter) {
  PyObject* argument = arguments[parameter];
  if (argument == nullptr || argument == Py_None) return std::nullopt;
  if (!PyLong_Check(argument) || PyBool_Check(argument)) {
    refuse(parameter, "int or None", argument);
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(argument, &overflow);
  return overflow != 0 ? overflow * std::numeric_limits<int64_t>::max() : value;
}

Launch launch_mode(const Arguments& arguments) {
  PyObject* argument = arguments[kAsyncOp];
  if (argument == nullptr || argument == Py_False) return Launch::kBlocking;
  if (argument != Py_True) refuse(kAsyncOp, "bool", argument);
  return Launch::kAsync;
}

TensorCommunicator& communicator_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  void* communicator = instance->get_value_and_holder().value_ptr();
  if (communicator == nullptr) refuse("Communicator.__init__ has not run");
  return *static_cast<TensorCommunicator*>(communicator);
}

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t num_args,
                     PyObject* keywords) {
  try {
    return with_python_errors([&]() -> PyObject* {
      const Arguments arguments = bind(args, num_args, keywords);
      if (!THPVariable_Check(arguments[kTensor])) {
        refuse(kTensor, "torch.Tensor", arguments[kTensor]);
      }
      TensorCommunicator& communicator = communicator_of(self);
      const at::Tensor& tensor = THPVariable_Unpack(arguments[kTensor]);
      const auto options =
          parse_all_reduce_options(text(arguments, kOp, "sum"), text(arguments, kAlgorithm, "auto"),
                                   dtype(arguments, kWireDtype), dtype(arguments, kHopDtype),
                                   integer(arguments, kGroupSize));
      const Launch mode = launch_mode(arguments);
      WorkRef work;
      {
        const py::gil_scoped_release gil_released;
        work = communicator.run(
            Operation{.kind = CollectiveKind::kAllReduce, .outputs = tensor, .reduction = options},
            mode);
      }
      if (!work) Py_RETURN_NONE;
      return py::cast(c10::intrusive_ptr<::c10d::Work>(std::move(work))).release().ptr();
    });
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef all_reduce_def = {
    "all_reduce",
    // CPython itself casts methods with keywords through void(*)().
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
    METH_FASTCALL | METH_KEYWORDS,
    // inspect and help() read the part before the dashes as the signature.
    "all_reduce($self, tensor, op='sum', algorithm='auto', wire_dtype=None, hop_dtype=None, "
    "async_op=False, group_size=None)\n--\n\n"
    "Reduces tensor over all ranks, in place; rota/_C/__init__.pyi has the whole contract."};

}  // namespace

void add_all_reduce_method(PyTypeObject* type) {
  py::setattr(reinterpret_cast<PyObject*>(type), "all_reduce",
              py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &all_reduce_def)));
}

}  // namespace rota::tensors
