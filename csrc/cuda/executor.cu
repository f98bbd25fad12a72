#include "cuda/executor.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

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

using Object = std::shared_ptr<void>;

struct Left {
  std::mutex mutex;
  std::vector<Object> objects;
};

// Never destroyed: graphs may end after main() does.
Left& left() {
  static auto* const all = new Left;
  return *all;
}

void CUDART_CB leave(void* kept) {
  const std::unique_ptr<Object> object(static_cast<Object*>(kept));
  const std::lock_guard lock(left().mutex);
  left().objects.push_back(std::move(*object));
}

// Keeps an object as long as the graph that `stream` is being captured into, and what is made from
// that graph: it may be replayed when whoever captured it is gone.
void keep_in_graph(Stream stream, std::shared_ptr<void> object) {
  auto kept = std::make_unique<Object>(std::move(object));
  cudaUserObject_t handle = nullptr;
  check_cuda(cudaUserObjectCreate(&handle, kept.get(), &leave, 1, cudaUserObjectNoDestructorSync),
             "cudaUserObjectCreate");
  kept.release();
  const cudaError_t error =
      cudaGraphRetainUserObject(captured_on(stream).graph, handle, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) transport::forget_error(cudaUserObjectRelease(handle, 1));
  check_cuda(error, "cudaGraphRetainUserObject");
}

// Destroys the objects that only graphs kept which are gone. Graphs themselves only hand them over:
// what CUDA calls at their end may not call CUDA.
void destroy_left_by_graphs() {
  std::vector<Object> objects;
  {
    const std::lock_guard lock(left().mutex);
    objects.swap(left().objects);
  }
}

}  // namespace

void Executor::HostWordsDeleter::operator()(HostWords* words) const {
  transport::forget_error(cudaFreeHost(words));
}

Executor::Executor(const Options& options)
    : shared_(std::make_shared<Shared>()), tuning_(options.tuning) {
  destroy_left_by_graphs();
  shared_->words.reset(make_words());
  shared_->own_regions = options.own_regions;
  peers_.first_rank = options.rank;
  peers_.num_local_ranks = options.num_local_ranks;
  peers_.geometry = options.geometry;
  std::copy(options.regions.begin(), options.regions.end(), peers_.regions);
  peers_.abort = on_gpu(&words().abort);
  peers_.num_left = on_gpu(&words().num_left);
  peers_.failure = on_gpu(&words().failure);
  peers_.stall = on_gpu(&words().stall);
  peers_.stall_after_ns = static_cast<uint64_t>(options.stall_after.count());
  peers_.timeout_ns = static_cast<uint64_t>(options.timeout.count());
  if (has_transfers()) shared_->receives.emplace();
}

Executor::~Executor() {
  if (last_capture_ != 0) {
    abort();
    try {
      retire_regions();
    } catch (const Error&) {
      // The driver is gone, and with it all graphs.
    }
  }
  shared_.reset();
  destroy_left_by_graphs();
}

void Executor::retire_regions() {
  const transport::DeviceGeometry& geometry = peers_.geometry;
  std::vector<std::byte> words(geometry.packet_header(0, 0, 0));
  for (int channel = 0; channel < geometry.num_channels; ++channel) {
    for (int peer = 0; peer < geometry.world_size; ++peer) {
      auto* end = new (words.data() + geometry.link_end(channel, peer)) transport::LinkEnd{};
      end->counts.sent = end->counts.received = transport::kRetired;
    }
    auto* state = new (words.data() + geometry.channel_state(channel)) transport::ChannelState{};
    state->packet_rounds = transport::kRetired;
  }
  const CaptureUndisturbed undisturbed;
  for (int i = 0; i < peers_.num_local_ranks; ++i) {
    check_cuda(cudaMemcpy(peers_.regions[peers_.first_rank + i], words.data(), words.size(),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }
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
  auto& [words, own_regions, order, receives] = *shared_;
  uint64_t capture = 0;
  if (!is_receive) capture = order.enter(stream);
  if (receives && !is_send) capture = receives->enter(stream);
  if (capture != 0 && capture != last_capture_) {
    keep_in_graph(stream, shared_);
    last_capture_ = capture;
  }
  launch_collective(plan, peers_, stream);
  if (!is_receive) order.leave(stream);
  if (receives && !is_send) receives->leave(stream);
}

bool Executor::is_idle() const {
  const CaptureUndisturbed undisturbed;
  return shared_->order.is_idle() && (!shared_->receives || shared_->receives->is_idle());
}

std::optional<Failure> Executor::failure() const {
  return Failure::unpack_any(SharedWord<uint64_t>(words().failure).load(std::memory_order_relaxed));
}

std::optional<Failure> Executor::take_stall() {
  SharedWord<uint64_t> stall(words().stall);
  const uint64_t word = stall.load(std::memory_order_relaxed);
  stall.store(0, std::memory_order_relaxed);  // a stall reported in between is reported again
  return Failure::unpack_any(word);
}

void Executor::set_num_left(int num_left) {
  SharedWord<uint32_t>(words().num_left)
      .store(static_cast<uint32_t>(num_left), std::memory_order_release);
}

void Executor::abort() { SharedWord<uint32_t>(words().abort).store(1, std::memory_order_relaxed); }

}  // namespace rota::cuda
