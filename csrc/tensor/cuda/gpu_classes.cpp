#include "tensor/gpu_classes.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/timeout.h"
#include "tensor/cuda/device_windows.h"
#include "tensor/cuda/gradient_bucket.h"
#include "tensor/cuda/local_group.h"
#include "tensor/errors.h"
#include "tensor/gil.h"

namespace rota::tensors {
namespace {

namespace py = pybind11;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using Tensors = std::vector<at::Tensor>;

void add_local_group(py::module_& module) {
  using Holder = std::unique_ptr<LocalGroup, DeleteWithoutGil>;
  py::class_<LocalGroup, Holder>(module, "LocalGroup")
      .def(py::init([](int world_size, at::Device device, std::optional<int> num_channels,
                       std::chrono::milliseconds timeout,
                       const std::optional<schedule::Tuning>& tuning) {
             return with_python_errors([&] {
               return Holder(new LocalGroup({.world_size = world_size,
                                             .device = device,
                                             .num_channels = num_channels,
                                             .timeout = usable_timeout(timeout),
                                             .tuning = tuning}));
             });
           }),
           py::arg("world_size"), py::arg("device"), py::arg("num_channels"), py::arg("timeout"),
           py::arg("tuning"), ReleaseGil())
      .def_property_readonly("world_size", &LocalGroup::world_size)
      .def_property_readonly("num_channels", &LocalGroup::num_channels)
      .def_property_readonly("device", &LocalGroup::device)
      .def(
          "all_reduce",
          [](LocalGroup& self, const Tensors& tensors, std::string_view op,
             std::string_view algorithm, std::optional<int> group_size, std::string_view order) {
            with_python_errors([&] { self.all_reduce(tensors, op, algorithm, group_size, order); });
          },
          py::arg("tensors"), py::arg("op") = "sum", py::arg("algorithm") = "auto",
          py::arg("group_size") = py::none(), py::arg("order") = "rank", ReleaseGil())
      .def(
          "reduce_scatter",
          [](LocalGroup& self, const Tensors& outputs, const Tensors& inputs, std::string_view op,
             std::optional<int> group_size, std::string_view order) {
            with_python_errors(
                [&] { self.reduce_scatter(outputs, inputs, op, group_size, order); });
          },
          py::arg("outputs"), py::arg("inputs"), py::arg("op") = "sum",
          py::arg("group_size") = py::none(), py::arg("order") = "rank", ReleaseGil())
      .def(
          "all_gather",
          [](LocalGroup& self, const Tensors& outputs, const Tensors& inputs) {
            with_python_errors([&] { self.all_gather(outputs, inputs); });
          },
          py::arg("outputs"), py::arg("inputs"), ReleaseGil())
      .def(
          "broadcast",
          [](LocalGroup& self, const Tensors& tensors, int root) {
            with_python_errors([&] { self.broadcast(tensors, root); });
          },
          py::arg("tensors"), py::arg("root") = 0, ReleaseGil())
      .def(
          "send_recv",
          [](LocalGroup& self, int src, int dst, const Tensors& tensors) {
            with_python_errors([&] { self.send_recv(src, dst, tensors); });
          },
          py::arg("src"), py::arg("dst"), py::arg("tensors"), ReleaseGil());
}

void add_gradient_bucket(py::module_& module) {
  py::class_<GradientBucket>(module, "GradientBucket")
      .def(py::init([](Tensors gradients, at::ScalarType wire_dtype, bool block_scaling) {
             return with_python_errors([&] {
               return std::make_unique<GradientBucket>(std::move(gradients), wire_dtype,
                                                       block_scaling);
             });
           }),
           py::arg("gradients"), py::arg("wire_dtype"), py::arg("block_scaling"), ReleaseGil())
      .def(
          "pack",
          [](GradientBucket& self, float contribution_factor,
             const std::optional<at::Tensor>& residual, std::optional<uint64_t> stochastic_seed) {
            with_python_errors([&] { self.pack(contribution_factor, residual, stochastic_seed); });
          },
          py::kw_only(), py::arg("contribution_factor") = 1.0f, py::arg("residual") = py::none(),
          py::arg("stochastic_seed") = py::none(), ReleaseGil())
      .def(
          "unpack",
          [](GradientBucket& self, float result_factor) {
            with_python_errors([&] { self.unpack(result_factor); });
          },
          py::kw_only(), py::arg("result_factor") = 1.0f, ReleaseGil())
      .def_property_readonly("wire", &GradientBucket::wire)
      .def_property_readonly("stats", &GradientBucket::stats)
      .def_property_readonly("num_elems", &GradientBucket::num_elems)
      .def_property_readonly("num_bytes", &GradientBucket::num_bytes)
      .def_property_readonly("num_wire_bytes",
                             [](const GradientBucket& self) { return self.wire().numel(); });
}

void add_device_windows(py::module_& module) {
  module.def(
      "map_device_windows",
      [](const std::shared_ptr<ExposedTensor>& own,
         const std::vector<std::shared_ptr<OpenedTensor>>& others, int rank,
         const c10::intrusive_ptr<::c10d::Store>& store, at::Device device, size_t num_bytes,
         const py::function& all_gather) {
        return with_python_errors([&] {
          return map_device_windows(
              own, others, rank, store, device, num_bytes, [&](const std::string& text) {
                const py::gil_scoped_acquire gil;
                return all_gather(py::bytes(text)).cast<std::vector<std::string>>();
              });
        });
      },
      py::arg("own"), py::arg("others"), py::arg("rank"), py::arg("store"), py::arg("device"),
      py::arg("num_bytes"), py::arg("all_gather"), ReleaseGil());
}

}  // namespace

void add_gpu_classes(py::module_& module) {
  add_local_group(module);
  add_gradient_bucket(module);
  add_device_windows(module);
}

}  // namespace rota::tensors
