#include "tensor/tensor_communicator.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include <iostream>
#include <mutex>

#include "base/cores.h"
#include "base/limits.h"
#include "cuda/device_info.h"
#include "tensor/errors.h"
#include "tensor/gil.h"
#include "tensor/tensor_checks.h"
#include "tensor/through_host.h"
#include "tensor/torch_store.h"
#include "transport/shared_memory.h"

namespace rota::tensors {
namespace {

// One collective fits here when it is small, so that it needs one flag and no handshake before it.
constexpr size_t kMessageBytes = 64 << 10;
// Slots hold whole cache lines of every dtype, in shards of any world size.
constexpr size_t kSlotGranuleBytes = 4096;
constexpr size_t kMaxSlotBytes = 1 << 30;

transport::Geometry make_geometry(size_t slot_bytes) {
  if (slot_bytes == 0 || slot_bytes % kSlotGranuleBytes != 0 || slot_bytes > kMaxSlotBytes) {
    throw Error(ErrorKind::kValue,
                join("rota.Communicator: slot_bytes is ", slot_bytes, ", expected a multiple of ",
                     kSlotGranuleBytes, " and at most ", kMaxSlotBytes));
  }
  return {.message_bytes = kMessageBytes, .slot_bytes = slot_bytes};
}

std::shared_ptr<Communicator> connect_ranks(const c10::intrusive_ptr<::c10d::Store>& store,
                                            int rank, int world_size,
                                            const TensorCommunicatorOptions& options) {
  if (world_size > kMaxWorldSize) {
    throw Error(ErrorKind::kValue, join("rota.Communicator: world_size is ", world_size,
                                        ", expected at most ", kMaxWorldSize, " on one host"));
  }
  TorchStore torch_store(store);
  return std::make_shared<Communicator>(
      transport::SharedMemoryTransport::connect(torch_store, rank, world_size,
                                                make_geometry(options.slot_bytes), options.timeout,
                                                options.check_interrupt),
      options.timeout, options.check_interrupt);
}

bool is_on_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void check_cpu_algorithm(std::optional<schedule::Algorithm> requested,
                         std::string_view collective) {
  if (requested != schedule::Algorithm::kLowLatency) return;
  throw Error(ErrorKind::kValue, join("rota.", collective,
                                      ": algorithm='low_latency' is for CUDA tensors; for CPU "
                                      "tensors 'one_shot' is the fastest of short ones"));
}

struct Living {
  std::mutex mutex;
  std::vector<std::weak_ptr<TensorCommunicator>> communicators;
};

Living& all_living() {
  static auto* living = new Living;  // never destroyed: the order of static destructors is unknown
  return *living;
}

}  // namespace

std::shared_ptr<TensorCommunicator> TensorCommunicator::connect(
    const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
    const TensorCommunicatorOptions& options) {
  std::shared_ptr<TensorCommunicator> communicator(new TensorCommunicator(
      store, rank, world_size, options.check_interrupt,
      with_python_errors([&] { return connect_ranks(store, rank, world_size, options); })));
  Living& living = all_living();
  const std::lock_guard lock(living.mutex);
  std::erase_if(living.communicators, [](const auto& weak) { return weak.expired(); });
  living.communicators.push_back(communicator);
  return communicator;
}

TensorCommunicator::TensorCommunicator(c10::intrusive_ptr<::c10d::Store> store, int rank,
                                       int world_size, std::function<void()> check_interrupt,
                                       std::shared_ptr<Communicator> communicator)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      check_interrupt_(std::move(check_interrupt)),
      communicator_(std::move(communicator)),
      queue_(world_size < num_usable_cores() ? ProgressQueue::Placement::kAnyCore
                                             : ProgressQueue::Placement::kCoreOfCaller) {}

void TensorCommunicator::end_progress_of_all() {
  std::vector<std::weak_ptr<TensorCommunicator>> communicators;
  {
    const std::lock_guard lock(all_living().mutex);
    communicators = all_living().communicators;
  }
  // Outside the lock: a task that has to end first may make or drop a communicator.
  for (const auto& weak : communicators) {
    if (const auto communicator = weak.lock()) communicator->end_progress();
  }
}

void TensorCommunicator::end_progress() {
  const GilReleased gil_released;
  if (communicator_ && !queue_.is_idle()) {
    communicator_->abort(join("rank ", rank_, " dropped its communicator with work pending"));
  }
  queue_.close();
  drop_devices();
}

// What it has on its GPU is freed there; in a forked child there is no GPU.
void TensorCommunicator::drop_devices() {
  c10::OptionalDeviceGuard on_device;
  try {
    if (devices_) on_device.reset_device(devices_->device());
  } catch (const c10::Error&) {
  }
  devices_.reset();
}

template <typename Body>
WorkRef TensorCommunicator::launch(Launch mode, ::c10d::OpType op_type, const char* title,
                                   at::TensorList tensors, Body&& body) {
  if (mode == Launch::kBlocking && queue_.is_idle()) {
    // What profilers show of this call, as Work shows a queued one; 16 ns where none runs.
    RECORD_USER_SCOPE(title);
    // The communicator is shared: a signal handler or a callback may close it meanwhile.
    const std::shared_ptr<Communicator> communicator = communicator_;
    body(*communicator, tensors, CallerThread::kUser);
    return {};
  }
  auto work = c10::make_intrusive<HostWork>(rank_, op_type, title, tensors.vec(), check_interrupt_);
  queue_.enqueue([communicator = communicator_, work, body = std::forward<Body>(body)] {
    std::exception_ptr exception;
    try {
      with_python_errors([&] { body(*communicator, work->tensors(), CallerThread::kProgress); });
    } catch (...) {
      exception = std::current_exception();
    }
    work->complete(exception);
  });
  if (mode == Launch::kAsync) return work;
  work->wait(kNoTimeout);
  return {};
}

// Also before a task is queued: in a forked child there is no thread that would run it.
Communicator& TensorCommunicator::usable_communicator(std::string_view collective) const {
  if (!communicator_) {
    throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
  }
  communicator_->check_usable(collective);
  return *communicator_;
}

DeviceCollectives& TensorCommunicator::device_collectives(const at::Tensor& tensor,
                                                          std::string_view collective) {
  usable_communicator(collective);
  connect_device(tensor.device());
  return *devices_;
}

void TensorCommunicator::connect_device(at::Device device) {
  if (devices_ && devices_->device() == device) return;
  with_python_errors([&] {
    usable_communicator("connect_device");
    if (!device.is_cuda() || !device.has_index()) {
      throw Error(ErrorKind::kValue, join("rota.connect_device: device is ", device.str(),
                                          ", expected a CUDA device with its index"));
    }
    if (devices_) {
      throw Error(ErrorKind::kValue,
                  join("rota: a tensor is on ", device.str(), ", but this communicator is on ",
                       devices_->device().str(),
                       "; a rank has one GPU: move the tensor, or make another communicator"));
    }
    if (is_capturing(device)) {
      throw Error(ErrorKind::kValue,
                  "rota: a graph is being captured, and the GPUs are not joined yet; call "
                  "Communicator.connect_device(device) on every rank before");
    }
    launch(Launch::kBlocking, ::c10d::OpType::UNKNOWN, "rota:connect_device", {},
           [this, device](Communicator&, at::TensorList, CallerThread thread) {
             try {
               devices_ = connect_devices(communicator_, store_, device, thread,
                                          std::make_unique<ThroughHost>(*this, device));
             } catch (const Error& error) {
               if (error.kind() != ErrorKind::kTransport || cuda::archs().empty()) throw;
               std::cerr << join(error.what(), ". Collectives on CUDA tensors of rank ", rank_,
                                 " go through the host's memory, which is slow\n");
               devices_ = std::make_unique<ThroughHost>(*this, device);
             }
           });
  });
}

std::optional<std::string> TensorCommunicator::peer_access() const {
  if (!devices_) return std::nullopt;
  return devices_->means();
}

WorkRef TensorCommunicator::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                       Launch mode) {
  return with_python_errors([&] {
    if (!tensors.empty() && is_on_gpu(tensors[0])) {
      return device_collectives(tensors[0], "all_reduce").all_reduce(tensors, options, mode);
    }
    const Communicator& communicator = usable_communicator("all_reduce");
    check_cpu_algorithm(options.algorithm, "all_reduce");
    c10::SmallVector<cpu::AllReduceArgs, 1> plans;
    for (const at::Tensor& tensor : tensors) {
      check_tensor(tensor, "all_reduce");
      plans.push_back(communicator.plan(request_of(tensor, options)));
    }
    return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:all_reduce", tensors,
                  [plans = std::move(plans)](Communicator& communicator, at::TensorList tensors,
                                             CallerThread thread) {
                    for (size_t i = 0; i < tensors.size(); ++i) {
                      run_all_reduce(communicator, tensors[i], plans[i], thread);
                    }
                  });
  });
}

WorkRef TensorCommunicator::reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                                          Launch mode) {
  return with_python_errors([&] {
    if (is_on_gpu(bucket)) {
      return device_collectives(bucket, "reduce_bucket").reduce_bucket(bucket, options, mode);
    }
    const Communicator& communicator = usable_communicator("reduce_bucket");
    check_bucket(bucket, options);
    check_cpu_algorithm(options.algorithm, "reduce_bucket");
    const cpu::AllReduceArgs plan = communicator.plan(request_of(bucket, options), options.pass);
    return launch(
        mode, ::c10d::OpType::ALLREDUCE, "rota:reduce_bucket", bucket,
        [plan, options](Communicator& communicator, at::TensorList tensors, CallerThread thread) {
          run_reduce_bucket(communicator, tensors[0], options, plan, thread);
        });
  });
}

WorkRef TensorCommunicator::broadcast(at::TensorList tensors, int root, Launch mode) {
  return with_python_errors([&] {
    usable_communicator("broadcast").check_root(root);
    if (!tensors.empty() && is_on_gpu(tensors[0])) {
      return device_collectives(tensors[0], "broadcast").broadcast(tensors, root, mode);
    }
    for (const at::Tensor& tensor : tensors) {
      check_tensor(tensor, "broadcast");
      movable_dtype(tensor, "broadcast");
    }
    return launch(mode, ::c10d::OpType::BROADCAST, "rota:broadcast", tensors,
                  [root](Communicator& communicator, at::TensorList tensors, CallerThread thread) {
                    for (const at::Tensor& tensor : tensors) {
                      run_broadcast(communicator, tensor, root, thread);
                    }
                  });
  });
}

WorkRef TensorCommunicator::all_gather(std::vector<AllGatherTensors> gathers, Launch mode) {
  return with_python_errors([&] {
    usable_communicator("all_gather");
    if (!gathers.empty() && is_on_gpu(gathers[0].input)) {
      return device_collectives(gathers[0].input, "all_gather").all_gather(gathers, mode);
    }
    std::vector<at::Tensor> results;
    for (const AllGatherTensors& gather : gathers) {
      check_gather(gather, world_size_);
      results.insert(results.end(), gather.outputs.begin(), gather.outputs.end());
    }
    return launch(mode, ::c10d::OpType::ALLGATHER, "rota:all_gather", results,
                  [gathers = std::move(gathers)](Communicator& communicator, at::TensorList,
                                                 CallerThread thread) {
                    for (const AllGatherTensors& gather : gathers) {
                      run_all_gather(communicator, gather, thread);
                    }
                  });
  });
}

bool TensorCommunicator::has_reduce_scatter(const at::Tensor& input) {
  return with_python_errors([&] {
    return device_collectives(input, "reduce_scatter").has_reduce_scatter(input.scalar_type());
  });
}

WorkRef TensorCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           ReduceOp op, Launch mode) {
  return with_python_errors([&] {
    if (!is_on_gpu(input)) {
      throw Error(ErrorKind::kType,
                  "rota.reduce_scatter: the input is not a CUDA tensor, for which alone there is a "
                  "reduce_scatter; all_reduce a CPU tensor and take a part");
    }
    return device_collectives(input, "reduce_scatter").reduce_scatter(output, input, op, mode);
  });
}

AllGatherTensors TensorCommunicator::split_by_rank(const at::Tensor& output,
                                                   const at::Tensor& input) const {
  return with_python_errors([&]() -> AllGatherTensors {
    check_tensor(input, "all_gather", input.device());
    check_tensor(output, "all_gather", input.device());
    if (!output.is_contiguous() || output.numel() != input.numel() * world_size_) {
      throw Error(ErrorKind::kValue,
                  join("rota.all_gather: the output has ", output.numel(), " elements",
                       output.is_contiguous() ? "" : " and is not contiguous",
                       ", expected a contiguous tensor of ", input.numel(), " * ", world_size_));
    }
    return {output.view({world_size_, input.numel()}).unbind(), input};
  });
}

// For what only some ranks call.
DeviceCollectives& TensorCommunicator::joined_devices(const at::Tensor& tensor,
                                                      std::string_view call) {
  usable_communicator(call);
  if (!is_on_gpu(tensor)) {
    throw Error(ErrorKind::kType, join("rota.", call,
                                       ": the tensor is not a CUDA tensor, for which "
                                       "alone there is a ",
                                       call, "; use Gloo for CPU tensors"));
  }
  if (!devices_ && world_size_ == 2) connect_device(tensor.device());
  if (!devices_) {
    throw Error(ErrorKind::kTransport,
                join("rota.", call,
                     ": the GPUs are not joined yet, which takes all ranks; call "
                     "Communicator.connect_device() or any collective of CUDA tensors on each"));
  }
  return *devices_;
}

WorkRef TensorCommunicator::send(const at::Tensor& tensor, int peer, Launch mode) {
  return with_python_errors(
      [&] { return joined_devices(tensor, "send").send(tensor, peer, mode); });
}

WorkRef TensorCommunicator::recv(const at::Tensor& tensor, int peer, Launch mode) {
  return with_python_errors(
      [&] { return joined_devices(tensor, "recv").recv(tensor, peer, mode); });
}

WorkRef TensorCommunicator::barrier(Launch mode) {
  return with_python_errors([&] {
    usable_communicator("barrier");
    return launch(mode, ::c10d::OpType::BARRIER, "rota:barrier", {},
                  [](Communicator& communicator, at::TensorList, CallerThread thread) {
                    communicator.barrier(thread);
                  });
  });
}

void TensorCommunicator::close() {
  if (!communicator_) return;
  // Runs behind everything that is queued, and an interruptible wait for it.
  auto last = c10::make_intrusive<HostWork>(rank_, ::c10d::OpType::UNKNOWN, nullptr,
                                            std::vector<at::Tensor>(), check_interrupt_);
  if (!queue_.is_idle()) {
    queue_.enqueue([last] { last->complete(nullptr); });
    last->wait(kNoTimeout);
  }
  queue_.close();
  if (devices_) devices_->finish(check_interrupt_);
  drop_devices();
  communicator_.reset();
}

void TensorCommunicator::abort(const std::string& reason) {
  if (communicator_) communicator_->abort(reason);
}

}  // namespace rota::tensors
