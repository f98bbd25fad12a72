// Streams: each is a thread that runs what is queued, first in, first out, beside all others. What
// is queued on a stream that is being captured becomes a node of a graph instead.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "completion.h"
#include "result.h"

namespace simulated_gpu {

struct Capture;
class Queue;

// What a stream is asked to do. `make` is called when it is queued and, in a graph, each time that
// the graph is launched; it gives what the stream's thread then runs.
struct Operation {
  cudaGraphNodeType type;
  std::function<Task()> make;
};

class Stream {
 public:
  Stream(int device, unsigned flags, int priority, bool is_default);
  // Returns at once; what is queued still runs.
  ~Stream();

  int device() const { return device_; }
  int priority() const { return priority_; }
  unsigned long long id() const { return id_; }
  bool is_default() const { return is_default_; }
  // The device's default stream waits for it and is waited for.
  bool is_blocking() const { return (flags_ & cudaStreamNonBlocking) == 0; }

  // Starts once what was queued before is done, and `after` too.
  CompletionPtr enqueue(Task task, std::vector<CompletionPtr> after, cudaGraphNodeType type);
  // When the last that was queued is complete; null where nothing was.
  const CompletionPtr& last() const { return last_; }

  // Null while it is not captured.
  std::shared_ptr<Capture> capture;
  std::vector<cudaGraphNode_t> frontier;  // what the next node of the capture comes after

 private:
  const int device_;
  const unsigned flags_;
  const int priority_;
  const unsigned long long id_;
  const bool is_default_;
  std::shared_ptr<Queue> queue_;
  CompletionPtr last_;
};

// Guards streams, events, captures and graphs; held by calls, never by what streams run.
std::mutex& runtime_mutex();

// call() of a body that has the lock.
template <typename Body>
cudaError_t call_locked(const Body& body) noexcept {
  return call([&] {
    const std::lock_guard guard(runtime_mutex());
    body();
  });
}

// Both under the lock. The first fails as CUDA does where the handle is none.
Stream& stream_of(cudaStream_t handle);
// Null where the stream is captured.
CompletionPtr submit(Stream& stream, Operation operation);

// Without the lock.
void wait_for_device(int device);
void wait_for_all_devices();

}  // namespace simulated_gpu
