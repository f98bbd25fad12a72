// Python bindings of windows, without logic; python/rota/_C/__init__.pyi documents them.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "bindings.h"
#include "tensor/errors.h"
#include "tensor/heap_tensor.h"
#include "tensor/hosts/window_service.h"
#include "tensor/options.h"
#include "tensor/stored_bytes.h"
#include "tensor/window.h"

namespace py = pybind11;

void bind_windows(py::module_ module) {
  using namespace rota::tensors;  // NOLINT: this file is a list of its names
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;

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
      .def(py::init(&make_window_service), py::arg("backend"), py::arg("hosts"), py::arg("rank"),
           py::arg("number"), ReleaseGil())
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

  module.def(
      "move_storage",
      [](const at::Tensor& tensor, const at::Tensor& place, bool copies) {
        return with_python_errors([&] { return move_storage(tensor, place, copies); });
      },
      py::arg("tensor"), py::arg("place"), py::kw_only(), py::arg("copies"), ReleaseGil());
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
