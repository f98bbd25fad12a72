// Events: which point of a stream was last recorded, or, in a capture, which nodes.
#include <map>

#include "capture.h"
#include "devices.h"
#include "result.h"

namespace simulated_gpu {
namespace {

struct Event {
  unsigned flags;
  int device;
  // The last record, of either kind; null where there was none.
  CompletionPtr completion;
  std::shared_ptr<Capture> capture;
  std::vector<cudaGraphNode_t> after;

  bool has_timing() const { return (flags & cudaEventDisableTiming) == 0; }
};

// Captured graphs share them.
std::map<cudaEvent_t, std::shared_ptr<Event>>& events() {
  static auto* all = new std::map<cudaEvent_t, std::shared_ptr<Event>>;
  return *all;
}

const std::shared_ptr<Event>& event_of(cudaEvent_t handle) {
  const auto place = events().find(handle);
  require(place != events().end(), cudaErrorInvalidResourceHandle, "there is no such event");
  return place->second;
}

// As a node: each launch of the graph records the event anew.
Operation record_operation(const std::shared_ptr<Event>& event) {
  return {cudaGraphNodeTypeEventRecord, [event]() -> Task {
            const auto completion = std::make_shared<Completion>();
            event->completion = completion;
            event->capture = nullptr;
            return [completion] { completion->finish(); };
          }};
}
// Waits for the record that is the last one when the wait is queued.
Operation wait_operation(const std::shared_ptr<Event>& event) {
  return {cudaGraphNodeTypeWaitEvent,
          [event]() -> Task { return [completion = event->completion] { wait_for(completion); }; }};
}

// What a wait for the event waits for; null where there is nothing.
CompletionPtr awaited(cudaEvent_t handle, const char* call_name) {
  refuse_while_capturing(call_name);
  const std::lock_guard guard(runtime_mutex());
  const std::shared_ptr<Event>& event = event_of(handle);
  if (event->capture != nullptr) {
    if (event->capture->is_active) invalidate(*event->capture, call_name);
    fail(cudaErrorCapturedEvent);
  }
  return event->completion;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call([&] {
    check_device(current_device());
    auto event = std::make_shared<Event>(Event{.flags = flags, .device = current_device()});
    const std::lock_guard guard(runtime_mutex());
    *handle = reinterpret_cast<cudaEvent_t>(event.get());
    events()[*handle] = std::move(event);
  });
}

extern "C" cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call_locked([&] {
    event_of(handle);
    events().erase(handle);
  });
}

extern "C" cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                                unsigned flags) {
  return call_locked([&] {
    const std::shared_ptr<Event>& event = event_of(handle);
    Stream& stream = stream_of(stream_handle);
    require(event->device == stream.device(), cudaErrorInvalidResourceHandle,
            "the event and the stream are of different devices");
    const bool is_external = (flags & cudaEventRecordExternal) != 0;
    require(!is_external || stream.capture != nullptr, cudaErrorIllegalState,
            "an external record outside a capture");
    if (stream.capture != nullptr && !is_external) {
      event->completion = nullptr;
      event->capture = stream.capture;
      event->after = stream.frontier;
    } else if (is_external) {
      submit(stream, record_operation(event));
    } else {
      // What the stream has done when the record is done, so that a query of the stream, which asks
      // for its last operation, cannot come between the two.
      const Operation nothing{cudaGraphNodeTypeEventRecord, [] { return Task([] {}); }};
      event->completion = submit(stream, nothing);
      event->capture = nullptr;
    }
  });
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

extern "C" cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                                   const cudaGraphNode_t* after, size_t num,
                                                   cudaEvent_t event) {
  return call_locked([&] {
    *node = graph_of(graph).add(record_operation(event_of(event)), {after, after + num});
  });
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle,
                                           unsigned flags) {
  return call_locked([&] {
    const std::shared_ptr<Event>& event = event_of(handle);
    Stream& stream = stream_of(stream_handle);
    const bool is_external = (flags & cudaEventWaitExternal) != 0;
    require(!is_external || stream.capture != nullptr, cudaErrorIllegalState,
            "an external wait outside a capture");
    if (is_external) {
      submit(stream, wait_operation(event));
    } else if (event->capture != nullptr) {
      require(event->capture->is_active, cudaErrorInvalidValue,
              "the event was recorded in a capture that has ended");
      join_capture(stream, event->capture, event->after);
    } else if (event->completion != nullptr) {
      if (stream.capture != nullptr) {
        invalidate(*stream.capture, "a wait for an event that was not captured");
        fail(cudaErrorStreamCaptureIsolation);
      }
      submit(stream, wait_operation(event));
    }
  });
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call([&] { wait_for(awaited(event, "cudaEventSynchronize")); });
}

extern "C" cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call([&] {
    const CompletionPtr completion = awaited(event, "cudaEventQuery");
    require(completion == nullptr || completion->is_done(), cudaErrorNotReady);
  });
}

extern "C" cudaError_t cudaEventElapsedTime(float* elapsed_ms, cudaEvent_t begin, cudaEvent_t end) {
  return call_locked([&] {
    Completion::Time times[2];
    for (int i = 0; i < 2; ++i) {
      const Event& event = *event_of(i == 0 ? begin : end);
      require(event.has_timing(), cudaErrorInvalidResourceHandle, "an event without timing");
      require(event.completion != nullptr, cudaErrorInvalidResourceHandle,
              "the event was not recorded");
      require(event.completion->is_done(), cudaErrorNotReady);
      times[i] = event.completion->when();
    }
    *elapsed_ms = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  });
}
