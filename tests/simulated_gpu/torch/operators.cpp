// Torch's own operators on a simulated GPU: those that have kernels for CUDA and for the CPU get a
// new one for CUDA, which queues the CPU's on the current stream. Device memory is the host's, so
// it works on the very bytes; as a kernel does, when the stream gets there, and when a graph is
// replayed. Outputs are allocated when it is queued, with the shapes that torch's meta kernels
// tell.
//
// What cannot be known before it has run (nonzero, item) waits for the stream, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>

namespace {

using c10::IValue;
using torch::jit::Stack;

// ---- tensors -----------------------------------------------------------------------------------

// The same bytes, as a tensor of the CPU. Keeps nothing alive: like a kernel's, its memory is used
// again only by what is queued later.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       options);
}

// A Python number that became a tensor, of the CPU: it has less say in what dtype comes out.
bool is_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// A tensor of the CPU may change once the call has returned.
at::Tensor staged(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_cuda() || is_number(tensor) ? tensor : tensor.clone();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || is_number(tensor)) return tensor;
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// An argument with `change` applied to its tensors.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <typename Change>
Stack changed(const Stack& stack, const Change& change) {
  Stack result;
  for (const IValue& value : stack) result.push_back(changed(value, change));
  return result;
}

// As the CPU's kernel takes them. Random numbers are those of one generator that nothing else draws
// from; they are not CUDA's, and seeds have no say in them.
Stack arguments_on_host(const c10::FunctionSchema& schema, const Stack& arguments) {
  static const auto* const generator = new at::Generator(at::detail::createCPUGenerator());
  Stack host = changed(arguments, on_host);
  for (size_t i = 0; i < host.size(); ++i) {
    if (schema.arguments()[i].name() == "generator") host[i] = *generator;
  }
  return host;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// ---- streams -----------------------------------------------------------------------------------

void check(cudaError_t error) { TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

void run_without_autograd(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

struct Queued {
  std::function<void()> work;
  bool is_captured;  // then it runs more than once
};

void queue(const char* name, std::function<void()> work) {
  auto guarded = [name, work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "simulated GPU: %s failed on its stream: %s\n", name, error.what());
      std::abort();
    }
  };
  const bool is_captured =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  auto* queued = new Queued{std::move(guarded), is_captured};
  check(cudaLaunchHostFunc(
      c10::cuda::getCurrentCUDAStream(),
      [](void* data) {
        auto* item = static_cast<Queued*>(data);
        item->work();
        if (!item->is_captured) delete item;
      },
      queued));
}

void wait_for_stream() { c10::cuda::getCurrentCUDAStream().synchronize(); }

// ---- operators ---------------------------------------------------------------------------------

// What an operator gives back: one of its arguments, or something new.
std::optional<size_t> returned_argument(const c10::FunctionSchema& schema, size_t index) {
  const c10::AliasInfo* alias = schema.returns()[index].alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* other = schema.arguments()[i].alias_info();
    if (other != nullptr && *other == *alias) return i;
  }
  return std::nullopt;
}

bool is_written(const c10::FunctionSchema& schema, size_t argument) {
  const c10::AliasInfo* alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool writes_to_host(const c10::FunctionSchema& schema, const Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(schema, i)) continue;
    for (const at::Tensor& tensor : tensors_of(arguments[i])) {
      if (tensor.defined() && !tensor.is_cuda()) return true;
    }
  }
  return false;
}

// None where there is no meta kernel, where it has nothing to tell, or refuses: the CPU's kernel
// then says what is wrong.
std::optional<Stack> results_on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  for (const c10::Argument& result : op.schema().returns()) {
    const c10::TypeKind kind = result.type()->kind();
    const bool is_tensor = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    if (!is_tensor) return std::nullopt;
  }
  Stack stack = changed(arguments, on_meta);
  for (IValue& value : stack) {
    if (value.isGenerator()) value = IValue();
  }
  const Stack meta_arguments = stack;
  try {
    run_without_autograd(op, stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  // An output that was given empty gets its shape.
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(op.schema(), i)) continue;
    const auto given = tensors_of(arguments[i]);
    const auto wanted = tensors_of(meta_arguments[i]);
    for (size_t t = 0; t < given.size(); ++t) {
      if (given[t].defined() && given[t].sizes() != wanted[t].sizes()) {
        given[t].resize_(wanted[t].sizes());
      }
    }
  }
  return stack;
}

c10::Device device_of(const Stack& arguments) {
  for (const IValue& argument : arguments) {
    for (const at::Tensor& tensor : tensors_of(argument)) {
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    }
  }
  return {at::kCUDA, c10::cuda::current_device()};
}

void run_now(const c10::OperatorHandle& op, const Stack& arguments, Stack& results) {
  const c10::Device device = device_of(arguments);
  wait_for_stream();
  results = arguments_on_host(op.schema(), arguments);
  run_without_autograd(op, results);
  for (size_t i = 0; i < results.size(); ++i) {
    const auto argument = returned_argument(op.schema(), i);
    results[i] =
        argument ? arguments[*argument] : changed(results[i], [&](const at::Tensor& tensor) {
          return tensor.defined() ? tensor.to(device) : tensor;
        });
  }
}

void run_on_stream(const c10::OperatorHandle& op, const Stack& arguments, Stack& results) {
  const c10::Device device = device_of(arguments);
  const Stack host_arguments = arguments_on_host(op.schema(), changed(arguments, staged));
  // results: as meta tensors; from here on, as they are given back.
  for (size_t i = 0; i < results.size(); ++i) {
    const auto argument = returned_argument(op.schema(), i);
    results[i] = argument ? arguments[*argument] : changed(results[i], [&](const at::Tensor& meta) {
      if (!meta.defined()) return meta;
      return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
    });
  }
  const Stack host_results = changed(results, on_host);
  queue(op.schema().name().c_str(), [op, host_arguments, host_results] {
    Stack stack = host_arguments;
    run_without_autograd(op, stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      if (returned_argument(op.schema(), i)) continue;
      const auto made = tensors_of(stack[i]);
      const auto wanted = tensors_of(host_results[i]);
      for (size_t t = 0; t < made.size(); ++t) {
        if (made[t].defined()) at::Tensor(wanted[t]).copy_(made[t]);
      }
    }
  });
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const Stack arguments(stack->end() - static_cast<ptrdiff_t>(num_arguments), stack->end());
  stack->resize(stack->size() - num_arguments);
  const c10::cuda::CUDAGuard guard(device_of(arguments));
  Stack results;
  auto on_meta_results = results_on_meta(op, arguments);
  if (!on_meta_results || writes_to_host(op.schema(), arguments)) {
    run_now(op, arguments, results);
  } else {
    results = std::move(*on_meta_results);
    run_on_stream(op, arguments, results);
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

// What is a copy of bytes goes torch's own way, by cudaMemcpyAsync.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const bool is_plain = self.dtype() == src.dtype() && self.sizes() == src.sizes() &&
                        self.is_contiguous() && src.is_contiguous() &&
                        self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg();
  if (is_plain || self.numel() == 0) return at::native::copy_(self, src, non_blocking);
  const c10::cuda::CUDAGuard guard(self.is_cuda() ? self.device() : src.device());
  const at::Tensor host_self = on_host(self);
  const at::Tensor host_src = on_host(staged(src)).expand(self.sizes());
  if (!self.is_cuda()) {
    wait_for_stream();
    host_self.copy_(host_src);
  } else {
    queue("copy_", [=] {
      const at::AutoDispatchBelowADInplaceOrView below;
      at::Tensor(host_self).copy_(host_src);
    });
  }
  return self;
}

// The CPU has no kernel of this one, so here is its formula, in operators that it has.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad_out, const at::Tensor& input, at::IntArrayRef normalized_shape,
    const at::Tensor& rstd, const std::optional<at::Tensor>& weight, std::array<bool, 2> wanted) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool has_weight = weight && weight->defined();
  std::vector<int64_t> inner, outer;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    const bool is_inner = dim >= input.dim() - static_cast<int64_t>(normalized_shape.size());
    (is_inner ? inner : outer).push_back(dim);
  }
  const at::Tensor normalized = input * rstd;
  const at::Tensor grad = has_weight ? grad_out * *weight : grad_out;
  at::Tensor grad_input, grad_weight;
  if (wanted[0]) {
    grad_input = (grad - normalized * (grad * normalized).mean(inner, /*keepdim=*/true)) * rstd;
  }
  if (wanted[1] && has_weight) {
    grad_weight = outer.empty() ? grad_out * normalized : (grad_out * normalized).sum(outer);
  }
  return {grad_input, grad_weight};
}

// Those that allocate, or move nothing: torch's own do.
const std::set<std::string> kLeftAlone{
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::copy_",
    "aten::empty",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::zero_",
};

bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) return true;
  }
  return false;
}

void replace_kernels(torch::Library& library) {
  const auto boxed = [] { return torch::CppFunction::makeFromBoxedFunction<&run_operator>(); };
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kLeftAlone.count(name.name) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || is_view(op->schema())) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    library.impl(toString(name).c_str(), boxed());
  }
  // Composite, of a kernel that torch picks by the device.
  library.impl("aten::ldexp.Tensor", boxed());
  library.impl("aten::copy_", &copy_);
  library.impl("aten::_fused_rms_norm_backward", &rms_norm_backward);
}

// Torch says once that kernels are replaced, which is what this is for.
class QuietWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

struct Replaced {
  Replaced() {
    QuietWarnings quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    replace_kernels(library);
    // Attention by operators that the CPU has, too.
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};
// Never destroyed: the dispatcher may be gone by then.
const auto* const replaced = new Replaced;

}  // namespace
