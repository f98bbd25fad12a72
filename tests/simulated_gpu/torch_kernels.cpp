#include "torch_kernels.h"

#include <array>
#include <cstring>

namespace simulated_gpu {
namespace {

// vectorized_elementwise_kernel<vec_size, FillFunctor<scalar>, array>(int num_elems, FillFunctor
// value, array of the one output): fill_() of a contiguous tensor.
constexpr std::string_view kFill = "at::native::vectorized_elementwise_kernel<";
constexpr std::string_view kFunctor = "at::native::FillFunctor<";

struct Scalar {
  std::string_view name;
  size_t num_bytes;
};
constexpr std::array kScalars{
    Scalar{"float", 4},
    Scalar{"double", 8},
    Scalar{"c10::Half", 2},
    Scalar{"c10::BFloat16", 2},
    Scalar{"bool", 1},
    Scalar{"unsigned char", 1},
    Scalar{"signed char", 1},
    Scalar{"short", 2},
    Scalar{"int", 4},
    Scalar{"long", 8},
    Scalar{"unsigned short", 2},
    Scalar{"unsigned int", 4},
    Scalar{"unsigned long", 8},
    Scalar{"c10::Float8_e4m3fn", 1},
    Scalar{"c10::Float8_e5m2", 1},
    Scalar{"c10::complex<float>", 8},
    Scalar{"c10::complex<double>", 16},
};

size_t scalar_bytes(std::string_view name) {
  for (const Scalar& scalar : kScalars) {
    if (!name.starts_with(scalar.name)) continue;
    const std::string_view rest = name.substr(scalar.name.size());
    if (rest.starts_with(">") || rest.starts_with(" >")) return scalar.num_bytes;
  }
  return 0;
}

}  // namespace

Task prepare_torch_kernel(std::string_view name, void** args) {
  const size_t functor = name.find(kFunctor);
  if (name.find(kFill) == std::string_view::npos || functor == std::string_view::npos) return {};
  const size_t elem_bytes = scalar_bytes(name.substr(functor + kFunctor.size()));
  if (elem_bytes == 0) return {};
  const auto num_elems = static_cast<size_t>(*static_cast<const int*>(args[0]));
  std::array<std::byte, 16> value{};
  std::memcpy(value.data(), args[1], elem_bytes);
  auto* dst = *static_cast<std::byte* const*>(args[2]);
  return [=] {
    for (size_t i = 0; i < num_elems; ++i) {
      std::memcpy(dst + i * elem_bytes, value.data(), elem_bytes);
    }
  };
}

}  // namespace simulated_gpu
