// Arguments of methods that are bound by hand (communicator_methods.h): which argument belongs to
// which parameter, and their types. Errors name the method and the parameter.
#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <limits>

#include "base/error.h"

namespace rota::tensors {

inline constexpr int kMaxParameters = 9;

// The parameters of one method, in order; those from num_required on have defaults.
class Signature {
 public:
  Signature(const char* method, int num_required, std::initializer_list<const char*> names)
      : method_(method), num_required_(num_required) {
    for (const char* name : names) {
      names_[num_parameters_] = name;
      interned_[num_parameters_++] = PyUnicode_InternFromString(name);
    }
  }

  const char* name(int parameter) const { return names_[parameter]; }
  int num_parameters() const { return num_parameters_; }
  int num_required() const { return num_required_; }

  // Throws for a keyword that names no parameter. Python passes keywords as interned strings, so
  // most comparisons are of pointers.
  int parameter_named(PyObject* keyword) const {
    for (int i = 0; i < num_parameters_; ++i) {
      if (keyword == interned_[i]) return i;
    }
    for (int i = 0; i < num_parameters_; ++i) {
      if (PyUnicode_Compare(keyword, interned_[i]) == 0) return i;
    }
    refuse(join("unknown keyword argument ", pybind11::repr(keyword).cast<std::string>()));
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kType, join("rota.", method_, ": ", what));
  }

 private:
  const char* method_;
  int num_required_;
  int num_parameters_ = 0;
  std::array<const char*, kMaxParameters> names_{};
  std::array<PyObject*, kMaxParameters> interned_{};
};

class PythonArguments {
 public:
  // Binds as Python does: positional arguments first, then keywords, whose values follow in `args`.
  PythonArguments(const Signature& signature, PyObject* const* args, Py_ssize_t num_positional,
                  PyObject* keywords)
      : signature_(signature) {
    if (num_positional > signature.num_parameters()) {
      signature.refuse(
          join(num_positional, " arguments, expected at most ", signature.num_parameters()));
    }
    std::copy_n(args, num_positional, bound_.begin());
    std::fill(bound_.begin() + num_positional, bound_.begin() + signature.num_parameters(),
              nullptr);
    const Py_ssize_t num_keywords = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
      const int parameter = signature.parameter_named(PyTuple_GET_ITEM(keywords, i));
      if (bound_[parameter] != nullptr) {
        signature.refuse(join(signature.name(parameter), " is given twice"));
      }
      bound_[parameter] = args[num_positional + i];
    }
    for (int i = 0; i < signature.num_required(); ++i) {
      if (bound_[i] == nullptr) signature.refuse(join("no ", signature.name(i), " is given"));
    }
  }

  bool is_given(int parameter) const { return bound_[parameter] != nullptr; }
  // The argument of one parameter; a default stands for None too, where the type names it.
  const at::Tensor& tensor(int parameter) const {
    if (!THPVariable_Check(bound_[parameter])) refuse(parameter, "torch.Tensor");
    return THPVariable_Unpack(bound_[parameter]);
  }
  std::string_view text(int parameter, std::string_view default_text) const {
    PyObject* argument = bound_[parameter];
    if (argument == nullptr) return default_text;
    if (!PyUnicode_Check(argument)) refuse(parameter, "str");
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(argument, &size);
    if (data == nullptr) throw pybind11::error_already_set();
    return {data, static_cast<size_t>(size)};
  }
  std::optional<at::ScalarType> dtype(int parameter) const {
    PyObject* argument = bound_[parameter];
    if (argument == nullptr || argument == Py_None) return std::nullopt;
    if (!THPDtype_Check(argument)) refuse(parameter, "torch.dtype or None");
    return reinterpret_cast<THPDtype*>(argument)->scalar_type;
  }
  std::optional<int64_t> integer(int parameter) const {
    PyObject* argument = bound_[parameter];
    const bool is_required = parameter < signature_.num_required();
    if (argument == nullptr || (argument == Py_None && !is_required)) return std::nullopt;
    if (!PyIndex_Check(argument) || PyBool_Check(argument)) {
      refuse(parameter, is_required ? "int" : "int or None");
    }
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(argument, &overflow);
    if (overflow != 0) return overflow * std::numeric_limits<int64_t>::max();
    if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return value;
  }
  // As an int; a number outside its range becomes the nearest one, which no rank has.
  std::optional<int> rank(int parameter) const {
    const auto value = integer(parameter);
    if (!value) return std::nullopt;
    using Limits = std::numeric_limits<int>;
    return static_cast<int>(std::clamp<int64_t>(*value, Limits::min(), Limits::max()));
  }
  bool flag(int parameter) const {
    PyObject* argument = bound_[parameter];
    if (argument == nullptr || argument == Py_False) return false;
    if (argument != Py_True) refuse(parameter, "bool");
    return true;
  }

 private:
  [[noreturn]] void refuse(int parameter, const char* expected) const {
    signature_.refuse(join(signature_.name(parameter), " is of type ",
                           Py_TYPE(bound_[parameter])->tp_name, ", expected ", expected));
  }

  const Signature& signature_;
  std::array<PyObject*, kMaxParameters> bound_;  // borrowed; null where left out
};

}  // namespace rota::tensors
