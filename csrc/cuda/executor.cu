#include "cuda/executor.h"

#include <algorithm>

#include "base/flag.h"
#include "transport/cuda_error.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;

HostWords* make_words() {
  void* words = nullptr;
  check_cuda(cudaHostAlloc(&words, sizeof(HostWords), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  return new (words) HostWords{};
}

// The GPU's address of a word in host memory.
template <typename Word>
Word* on_gpu(Word* word) {
  void* address = nullptr;
  check_cuda(cudaHostGetDevicePointer(&address, const_cast<std::remove_const_t<Word>*>(word), 0),
             "cudaHostGetDevicePointer");
  return static_cast<Word*>(address);
}

// Lets this thread query events without invalidating a stream capture in another thread.
class CaptureUndisturbed {
 public:
  CaptureUndisturbed() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~CaptureUndisturbed() { transport::forget_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void Executor::HostWordsDeleter::operator()(HostWords* words) const {
  transport::forget_error(cudaFreeHost(words));
}

Executor::Executor(const Options& options) : words_(make_words()), tuning_(options.tuning) {
  peers_.first_rank = options.rank;
  peers_.num_local_ranks = options.num_local_ranks;
  peers_.geometry = options.geometry;
  std::copy(options.regions.begin(), options.regions.end(), peers_.regions);
  peers_.abort = on_gpu(&words_->abort);
  peers_.num_left = on_gpu(&words_->num_left);
  peers_.failure = on_gpu(&words_->failure);
  peers_.stall = on_gpu(&words_->stall);
  peers_.stall_after_ns = static_cast<uint64_t>(options.stall_after.count());
  peers_.timeout_ns = static_cast<uint64_t>(options.timeout.count());
  if (has_transfers()) receives_.emplace();
}

ResidentPlan Executor::plan(const LaunchRequest& request) const {
  return plan_resident(request, peers_, tuning_);
}

void Executor::run(const ResidentPlan& plan, Stream stream) {
  if (plan.function == nullptr) return;
  const CollectiveArgs& args = plan.launch.args;
  const bool is_transfer = plan.kernel == Kernel::kTransfer && has_transfers();
  const bool is_send = is_transfer && args.source == peers_.first_rank;
  const bool is_receive = is_transfer && args.destination == peers_.first_rank;
  if (!is_receive) order_.enter(stream);
  if (receives_ && !is_send) receives_->enter(stream);
  launch_collective(plan, peers_, stream);
  if (!is_receive) order_.leave(stream);
  if (receives_ && !is_send) receives_->leave(stream);
}

bool Executor::is_idle() const {
  const CaptureUndisturbed undisturbed;
  return order_.is_idle() && (!receives_ || receives_->is_idle());
}

std::optional<Failure> Executor::failure() const {
  return Failure::unpack_any(SharedWord<uint64_t>(words_->failure).load(std::memory_order_relaxed));
}

std::optional<Failure> Executor::take_stall() {
  SharedWord<uint64_t> stall(words_->stall);
  const uint64_t word = stall.load(std::memory_order_relaxed);
  stall.store(0, std::memory_order_relaxed);  // a stall reported in between is reported again
  return Failure::unpack_any(word);
}

void Executor::set_num_left(int num_left) {
  SharedWord<uint32_t>(words_->num_left)
      .store(static_cast<uint32_t>(num_left), std::memory_order_release);
}

void Executor::abort() { SharedWord<uint32_t>(words_->abort).store(1, std::memory_order_relaxed); }

}  // namespace rota::cuda
