#include "tensor/errors.h"

namespace rota::tensors {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kPeerFailed:
      return "PeerFailed";
    case ErrorKind::kTimeout:
      return "Timeout";
    case ErrorKind::kMismatch:
      return "Mismatch";
    case ErrorKind::kTransport:
      return "TransportError";
    case ErrorKind::kNone:
    case ErrorKind::kInternal:
    case ErrorKind::kValue:
    case ErrorKind::kType:
      return "RotaError";
  }
  return "RotaError";
}

}  // namespace

PyObject* PythonError::python_type() {
  if (kind_ == ErrorKind::kValue) return PyExc_ValueError;
  if (kind_ == ErrorKind::kType) return PyExc_TypeError;
  THPObjectPtr errors(PyImport_ImportModule("rota.errors"));
  if (!errors) return PyExc_RuntimeError;
  PyObject* type = PyObject_GetAttrString(errors.get(), class_name(kind_));
  return type != nullptr ? type : PyExc_RuntimeError;  // owned by its module, never freed
}

}  // namespace rota::tensors
