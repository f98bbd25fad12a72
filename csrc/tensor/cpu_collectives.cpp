#include "tensor/cpu_collectives.h"

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include "base/cores.h"
#include "cpu/all_reduce_buffers.h"
#include "cpu/copy_collectives.h"
#include "tensor/errors.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

// Most calls have one tensor, for which these allocate nothing.
using Calls = c10::SmallVector<Call, 1>;

void run_all_reduce(Communicator& communicator, const at::Tensor& tensor, const Call& call,
                    CallerThread thread) {
  const Packed packed(tensor, Packed::Content::kRead);
  communicator.run(call, cpu::AllReduceBuffers{.data = packed.data()}, thread);
  packed.unpack();
}

void run_reduce_bucket(Communicator& communicator, const BucketTensors& tensors, const Call& call,
                       CallerThread thread) {
  const Packed packed(tensors.bucket, Packed::Content::kRead);
  cpu::BucketMeasures measures(call.num_elems);
  communicator.run(call,
                   cpu::AllReduceBuffers{
                       .data = packed.data(),
                       .residual = tensors.residual ? tensors.residual->data_ptr<float>() : nullptr,
                       .measures = &measures},
                   thread);
  packed.unpack();
  auto* stats = tensors.stats.data_ptr<double>();
  stats[0] = static_cast<double>(measures.num_non_finite);
  stats[1] = measures.sum_of_squares();
}

void run_broadcast(Communicator& communicator, const at::Tensor& tensor, const Call& call,
                   CallerThread thread) {
  const bool is_root = call.root == communicator.rank();
  const Packed packed(tensor, is_root ? Packed::Content::kRead : Packed::Content::kOverwritten);
  communicator.run(call, cpu::BroadcastBuffers{.data = packed.data()}, thread);
  if (!is_root) packed.unpack();
}

void run_all_gather(Communicator& communicator, const AllGatherTensors& gather, const Call& call,
                    CallerThread thread) {
  const Packed input(gather.input, Packed::Content::kRead);
  std::vector<Packed> outputs;
  std::vector<void*> pointers;
  for (const at::Tensor& tensor : gather.outputs) {
    pointers.push_back(outputs.emplace_back(tensor, Packed::Content::kOverwritten).data());
  }
  communicator.run(call, cpu::AllGatherBuffers{.input = input.data(), .outputs = pointers.data()},
                   thread);
  for (const Packed& output : outputs) output.unpack();
}

}  // namespace

CpuCollectives::CpuCollectives(std::shared_ptr<Communicator> communicator,
                               std::function<void()> check_interrupt)
    : rank_(communicator->rank()),
      communicator_(std::move(communicator)),
      check_interrupt_(std::move(check_interrupt)),
      planner_(communicator_->world_size()),
      queue_(communicator_->world_size() < num_usable_cores()
                 ? ProgressQueue::Placement::kAnyCore
                 : ProgressQueue::Placement::kCoreOfCaller) {}

template <typename Body>
WorkRef CpuCollectives::launch(Launch mode, ::c10d::OpType op_type, const char* title,
                               at::TensorList tensors, Body&& body) {
  if (mode == Launch::kBlocking && queue_.is_idle()) {
    // Shows this call to profilers, as Work does for a queued one; costs 16 ns without a profiler.
    RECORD_USER_SCOPE(title);
    // A copy of the pointer, because a signal handler or a callback may close the communicator
    // meanwhile.
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

WorkRef CpuCollectives::all_reduce(at::TensorList tensors, const AllReduceOptions& options,
                                   Launch mode) {
  Calls calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce");
    const DType dtype = reducible_dtype(tensor.scalar_type(), "the tensor's dtype");
    calls.push_back(planner_.all_reduce(dtype, num_elems(tensor), options));
  }
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:all_reduce", tensors,
                [calls = std::move(calls)](Communicator& communicator, at::TensorList tensors,
                                           CallerThread thread) {
                  for (size_t i = 0; i < tensors.size(); ++i) {
                    run_all_reduce(communicator, tensors[i], calls[i], thread);
                  }
                });
}

WorkRef CpuCollectives::reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                      Launch mode) {
  check_bucket(tensors);
  const Call call =
      planner_.reduce_bucket(bucket_dtype(tensors.bucket), num_elems(tensors.bucket), options);
  return launch(mode, ::c10d::OpType::ALLREDUCE, "rota:reduce_bucket", tensors.bucket,
                [tensors, call](Communicator& communicator, at::TensorList, CallerThread thread) {
                  run_reduce_bucket(communicator, tensors, call, thread);
                });
}

WorkRef CpuCollectives::broadcast(at::TensorList tensors, int root, Launch mode) {
  Calls calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "broadcast");
    calls.push_back(
        planner_.broadcast(movable_dtype(tensor, "broadcast"), num_elems(tensor), root));
  }
  return launch(mode, ::c10d::OpType::BROADCAST, "rota:broadcast", tensors,
                [calls = std::move(calls)](Communicator& communicator, at::TensorList tensors,
                                           CallerThread thread) {
                  for (size_t i = 0; i < tensors.size(); ++i) {
                    run_broadcast(communicator, tensors[i], calls[i], thread);
                  }
                });
}

WorkRef CpuCollectives::all_gather(std::vector<AllGatherTensors> gathers, Launch mode) {
  Calls calls;
  std::vector<at::Tensor> results;
  for (const AllGatherTensors& gather : gathers) {
    check_gather(gather, communicator_->world_size());
    calls.push_back(
        planner_.all_gather(movable_dtype(gather.input, "all_gather"), num_elems(gather.input)));
    results.insert(results.end(), gather.outputs.begin(), gather.outputs.end());
  }
  return launch(mode, ::c10d::OpType::ALLGATHER, "rota:all_gather", results,
                [gathers = std::move(gathers), calls = std::move(calls)](
                    Communicator& communicator, at::TensorList, CallerThread thread) {
                  for (size_t i = 0; i < gathers.size(); ++i) {
                    run_all_gather(communicator, gathers[i], calls[i], thread);
                  }
                });
}

WorkRef CpuCollectives::reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp, Launch) {
  throw Error(ErrorKind::kType,
              "rota.reduce_scatter: CPU tensors are not supported; use all_reduce and slice");
}

WorkRef CpuCollectives::send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) {
  return request(Direction::kSend, tensor, peer, tag, mode);
}

WorkRef CpuCollectives::recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) {
  return request(Direction::kRecv, tensor, peer, tag, mode);
}

WorkRef CpuCollectives::request(Direction direction, const at::Tensor& tensor, int peer,
                                int64_t tag, Launch mode) {
  check_tensor(tensor, name(direction));
  if (tag < 0) {
    throw Error(ErrorKind::kValue,
                join("rota.", name(direction), ": tag is ", tag, ", expected 0 or more"));
  }
  return RequestWork::start(direction, communicator_, tensor, peer, static_cast<uint64_t>(tag),
                            check_interrupt_, mode);
}

WorkRef CpuCollectives::barrier(Launch mode) {
  return launch(mode, ::c10d::OpType::BARRIER, "rota:barrier", {},
                [](Communicator& communicator, at::TensorList, CallerThread thread) {
                  communicator.barrier(thread);
                });
}

void CpuCollectives::run_in_turn(const char* title, std::function<void(CallerThread)> task) {
  launch(Launch::kBlocking, ::c10d::OpType::UNKNOWN, title, {},
         [task = std::move(task)](Communicator&, at::TensorList, CallerThread thread) {
           task(thread);
         });
}

void CpuCollectives::check_usable(std::string_view call) const {
  if (!communicator_) {
    throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
  }
  communicator_->check_usable(call);
}

void CpuCollectives::finish(const std::function<void()>& check_interrupt) {
  communicator_->point_to_point().finish(CallerThread::kUser);
  if (queue_.is_idle()) return;
  // Runs after everything that is queued.
  const auto last = c10::make_intrusive<HostWork>(rank_, ::c10d::OpType::UNKNOWN, nullptr,
                                                  std::vector<at::Tensor>(), check_interrupt);
  queue_.enqueue([last] { last->complete(nullptr); });
  last->wait(kNoTimeout);
}

void CpuCollectives::end_progress() {
  if (communicator_) {
    PointToPoint& links = communicator_->point_to_point();
    if (!queue_.is_idle() || links.has_unfinished_sends()) {
      communicator_->abort(join("rank ", rank_, " dropped its communicator with work pending"));
    }
    links.close();
  }
  queue_.close();
}

void CpuCollectives::close() {
  queue_.close();
  communicator_->point_to_point().close();
  communicator_.reset();
}

}  // namespace rota::tensors
