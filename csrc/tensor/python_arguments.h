// Arguments of methods that are bound by hand (communicator_methods.h): which argument belongs to
// which parameter, and their types. Errors name the method and the parameter.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rota::tensors {

inline constexpr int kMaxParameters = 9;

// The parameters of one method, in order; those from num_required on have defaults.
class Signature {
 public:
  Signature(const char* method, int num_required, std::initializer_list<const char*> names);

  const char* name(int parameter) const { return names_[parameter]; }
  int num_parameters() const { return num_parameters_; }
  int num_required() const { return num_required_; }

  // Throws for a keyword that names no parameter.
  int parameter_named(PyObject* keyword) const;
  [[noreturn]] void refuse(const std::string& what) const;

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
                  PyObject* keywords);

  bool is_given(int parameter) const { return bound_[parameter] != nullptr; }
  // The argument of one parameter; a default stands for None too, where the type names it.
  const at::Tensor& tensor(int parameter) const;
  std::string_view text(int parameter, std::string_view default_text) const;
  std::optional<at::ScalarType> dtype(int parameter) const;
  std::optional<int64_t> integer(int parameter) const;
  // As an int; a number outside its range becomes the nearest one, which no rank has.
  std::optional<int> rank(int parameter) const;
  bool flag(int parameter) const;

 private:
  [[noreturn]] void refuse(int parameter, const char* expected) const;

  const Signature& signature_;
  std::array<PyObject*, kMaxParameters> bound_;  // borrowed; null where left out
};

}  // namespace rota::tensors
