#include "streams.h"

#include <unistd.h>

#include <deque>
#include <map>
#include <set>
#include <utility>

#include "capture.h"
#include "cpp/random.h"
#include "devices.h"
#include "settings.h"
#include "threads.h"

namespace simulated_gpu {

// The place in a hardware queue, of what goes through one: it begins after the one before it has
// begun, so one that waits for its stream or for an event holds up those behind it. Null: any time.
struct Turn {
  CompletionPtr previous;
  CompletionPtr begun;
  bool ends_when_done = false;  // a wait, which begins nothing
};

// What the caller's side of a stream and its thread share.
class Queue {
 public:
  explicit Queue(uint64_t seed) : random_(seed) {}

  // `task` runs once `after` and what was pushed before are done; then `done` is.
  void push(Task task, std::vector<CompletionPtr> after, CompletionPtr done, const Turn& turn) {
    const std::lock_guard guard(mutex_);
    items_.push_back({std::move(task), std::move(after), std::move(done), turn});
    changed_.notify_one();
  }
  void close() {
    const std::lock_guard guard(mutex_);
    is_closed_ = true;
    changed_.notify_one();
  }

  // Until it is closed and empty.
  void run() {
    for (;;) {
      Item item;
      {
        std::unique_lock guard(mutex_);
        changed_.wait(guard, [&] { return is_closed_ || !items_.empty(); });
        if (items_.empty()) return;
        item = std::move(items_.front());
        items_.pop_front();
      }
      wait_for(item.turn.previous);
      wait_for_all(item.after);
      nap();
      if (item.turn.begun != nullptr && !item.turn.ends_when_done) item.turn.begun->finish();
      item.task();
      if (item.turn.begun != nullptr && item.turn.ends_when_done) item.turn.begun->finish();
      item.done->finish();
    }
  }

 private:
  struct Item {
    Task task;
    std::vector<CompletionPtr> after;
    CompletionPtr done;
    Turn turn;
  };

  // So that what does not wait for an event is early, or late.
  void nap() {
    const uint64_t max_nap_us = settings().max_nap_us;
    if (max_nap_us != 0 && random_.below(2) == 0) {
      usleep(static_cast<useconds_t>(random_.below(max_nap_us)));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool is_closed_ = false;
  rota::test::Random random_;  // of the stream's thread
};

namespace {

struct Streams {
  std::set<Stream*> created;
  std::vector<std::unique_ptr<Stream>> defaults;  // by device; made when they are first used
  unsigned long long last_id = 0;
  std::map<std::pair<int, uint64_t>, CompletionPtr> last_begun;  // by device and hardware queue
};

// Never destroyed: streams run while the process ends.
Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

std::vector<Stream*> streams_of_device(int device) {
  std::vector<Stream*> found;
  const auto& defaults = streams().defaults;
  const auto index = static_cast<size_t>(device);
  if (index < defaults.size() && defaults[index] != nullptr) found.push_back(defaults[index].get());
  for (Stream* stream : streams().created) {
    if (stream->device() == device) found.push_back(stream);
  }
  return found;
}

// What CUDA orders without being asked: the default stream and those that block.
std::vector<CompletionPtr> implied_by(const Stream& stream) {
  std::vector<CompletionPtr> after;
  if (!stream.is_blocking()) return after;
  for (const Stream* other : streams_of_device(stream.device())) {
    const bool is_ordered = other->is_blocking() && (stream.is_default() || other->is_default());
    if (other != &stream && is_ordered) after.push_back(other->last());
  }
  return after;
}

// Records of events go through no queue: as on GPUs, what one stream records after a kernel does
// not keep the kernels of others from running beside that one.
Turn next_turn(const Stream& stream, cudaGraphNodeType type) {
  const uint64_t num_queues = settings().num_hardware_queues;
  if (num_queues == 0 || type == cudaGraphNodeTypeEventRecord) return {};
  CompletionPtr& last = streams().last_begun[{stream.device(), stream.id() % num_queues}];
  Turn turn{last, std::make_shared<Completion>(), type == cudaGraphNodeTypeWaitEvent};
  last = turn.begun;
  return turn;
}

Stream& default_stream() {
  auto& defaults = streams().defaults;
  defaults.resize(static_cast<size_t>(num_devices()));
  auto& stream = defaults[static_cast<size_t>(current_device())];
  if (stream == nullptr) {
    stream = std::make_unique<Stream>(current_device(), cudaStreamDefault, 0, /*is_default=*/true);
  }
  return *stream;
}

// What a wait for this stream waits for; refused where CUDA refuses it.
CompletionPtr awaited(cudaStream_t handle, const char* call_name) {
  refuse_while_capturing(call_name);
  const std::lock_guard guard(runtime_mutex());
  const Stream& stream = stream_of(handle);
  if (stream.capture != nullptr) {
    invalidate(*stream.capture, call_name);
    fail(cudaErrorStreamCaptureUnsupported);
  }
  return stream.last();
}

}  // namespace

Stream::Stream(int device, unsigned flags, int priority, bool is_default)
    : device_(device),
      flags_(flags),
      priority_(priority),
      id_(++streams().last_id),
      is_default_(is_default) {}

Stream::~Stream() {
  if (queue_ != nullptr) queue_->close();
}

CompletionPtr Stream::enqueue(Task task, std::vector<CompletionPtr> after, cudaGraphNodeType type) {
  if (queue_ == nullptr) {
    queue_ = std::make_shared<Queue>(rota::test::mix(settings().seed) + id_);
    start_thread([queue = queue_] { queue->run(); }).detach();
  }
  last_ = std::make_shared<Completion>();
  queue_->push(std::move(task), std::move(after), last_, next_turn(*this, type));
  return last_;
}

std::mutex& runtime_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Stream& stream_of(cudaStream_t handle) {
  check_device(current_device());
  if (handle == nullptr || handle == cudaStreamLegacy) return default_stream();
  if (handle == cudaStreamPerThread) fail_unsupported("the stream cudaStreamPerThread");
  auto* stream = reinterpret_cast<Stream*>(handle);
  require(streams().created.contains(stream), cudaErrorInvalidResourceHandle,
          "there is no such stream");
  return *stream;
}

CompletionPtr submit(Stream& stream, Operation operation) {
  if (stream.capture != nullptr) {
    add_to_capture(stream, std::move(operation));
    return nullptr;
  }
  if (stream.is_default()) refuse_beside_capture();
  return stream.enqueue(operation.make(), implied_by(stream), operation.type);
}

void wait_for_device(int device) {
  std::vector<CompletionPtr> pending;
  {
    const std::lock_guard guard(runtime_mutex());
    for (const Stream* stream : streams_of_device(device)) pending.push_back(stream->last());
  }
  wait_for_all(pending);
}

void wait_for_all_devices() {
  for (int device = 0; device < num_devices(); ++device) wait_for_device(device);
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags,
                                                    int priority) {
  return call_locked([&] {
    check_device(current_device());
    auto* stream = new Stream(current_device(), flags, priority, /*is_default=*/false);
    streams().created.insert(stream);
    *handle = reinterpret_cast<cudaStream_t>(stream);
  });
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

extern "C" cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call_locked([&] {
    Stream& stream = stream_of(handle);
    require(!stream.is_default(), cudaErrorInvalidResourceHandle);
    streams().created.erase(&stream);
    delete &stream;
  });
}

extern "C" cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call_locked([&] { *priority = stream_of(handle).priority(); });
}

extern "C" cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return call_locked([&] { *id = stream_of(handle).id(); });
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call([&] { wait_for(awaited(handle, "cudaStreamSynchronize")); });
}

extern "C" cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call([&] {
    const CompletionPtr last = awaited(handle, "cudaStreamQuery");
    require(last == nullptr || last->is_done(), cudaErrorNotReady);
  });
}

extern "C" cudaError_t cudaDeviceSynchronize() {
  return call([&] {
    check_device(current_device());
    refuse_while_capturing("cudaDeviceSynchronize");
    wait_for_device(current_device());
  });
}

extern "C" cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call_locked([&] {
    const Task task = [=] { function(data); };
    submit(stream_of(handle), {cudaGraphNodeTypeHost, [=] { return task; }});
  });
}

extern "C" cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                             void* data, unsigned) {
  return call_locked([&] {
    const Task task = [=] { function(handle, cudaSuccess, data); };
    submit(stream_of(handle), {cudaGraphNodeTypeHost, [=] { return task; }});
  });
}
