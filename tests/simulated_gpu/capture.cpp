#include "capture.h"

#include <algorithm>
#include <set>

#include "result.h"

namespace simulated_gpu {
namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

// Those that are going on.
std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}

bool forbids_unsafe_calls(const Capture& capture) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != cudaStreamCaptureModeRelaxed;
  }
  return mode_of_thread == cudaStreamCaptureModeGlobal &&
         capture.mode == cudaStreamCaptureModeGlobal;
}

void require_valid(const Capture& capture) {
  if (capture.why_invalid.empty()) return;
  fail(cudaErrorStreamCaptureInvalidated, "the capture was spoiled by " + capture.why_invalid);
}

// All that the nodes come after, and themselves.
std::set<cudaGraphNode_t> with_all_before(const std::vector<cudaGraphNode_t>& nodes) {
  std::set<cudaGraphNode_t> found;
  std::vector<cudaGraphNode_t> stack = nodes;
  while (!stack.empty()) {
    const cudaGraphNode_t node = stack.back();
    stack.pop_back();
    if (!found.insert(node).second) continue;
    for (const cudaGraphNode_t before : node_of(node).after) stack.push_back(before);
  }
  return found;
}

bool is_joined(const Capture& capture) {
  const auto reached = with_all_before(capture.origin->frontier);
  return std::all_of(capture.members.begin(), capture.members.end(), [&](const Stream* member) {
    return std::all_of(member->frontier.begin(), member->frontier.end(),
                       [&](cudaGraphNode_t node) { return reached.contains(node); });
  });
}

}  // namespace

void refuse_while_capturing(const char* call_name) {
  const std::lock_guard guard(runtime_mutex());
  for (const auto& capture : captures()) {
    if (!forbids_unsafe_calls(*capture)) continue;
    invalidate(*capture, call_name);
    fail(cudaErrorStreamCaptureUnsupported, std::string(call_name) + " during a capture");
  }
}

void refuse_beside_capture() {
  for (const auto& capture : captures()) {
    if (!capture->origin->is_blocking() || !forbids_unsafe_calls(*capture)) continue;
    invalidate(*capture, "use of the default stream");
    fail(cudaErrorStreamCaptureImplicit);
  }
}

void invalidate(Capture& capture, const std::string& why) {
  if (capture.why_invalid.empty()) capture.why_invalid = why;
}

void add_to_capture(Stream& stream, Operation operation) {
  Capture& capture = *stream.capture;
  require_valid(capture);
  stream.frontier = {capture.graph->add(std::move(operation), stream.frontier)};
}

void join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                  const std::vector<cudaGraphNode_t>& after) {
  require_valid(*capture);
  if (stream.capture == nullptr) {
    require(!stream.is_default(), cudaErrorStreamCaptureImplicit);
    stream.capture = capture;
    stream.frontier.clear();
    capture->members.push_back(&stream);
  }
  require(stream.capture == capture, cudaErrorStreamCaptureMerge);
  for (const cudaGraphNode_t node : after) {
    const bool is_there =
        std::find(stream.frontier.begin(), stream.frontier.end(), node) != stream.frontier.end();
    if (!is_there) stream.frontier.push_back(node);
  }
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call([&] { std::swap(*mode, mode_of_thread); });
}

extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call_locked([&] {
    Stream& stream = stream_of(handle);
    require(!stream.is_default(), cudaErrorStreamCaptureUnsupported,
            "the default stream cannot be captured");
    require(stream.capture == nullptr, cudaErrorIllegalState, "the stream is captured already");
    static unsigned long long last_id = 0;
    stream.capture = std::make_shared<Capture>(Capture{.id = ++last_id,
                                                       .mode = mode,
                                                       .thread = std::this_thread::get_id(),
                                                       .origin = &stream,
                                                       .graph = std::make_unique<Graph>(),
                                                       .members = {&stream}});
    stream.frontier.clear();
    captures().push_back(stream.capture);
  });
}

extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call_locked([&] {
    *graph = nullptr;
    const std::shared_ptr<Capture> capture = stream_of(handle).capture;
    require(capture != nullptr, cudaErrorIllegalState, "the stream is not captured");
    require(capture->origin == &stream_of(handle), cudaErrorStreamCaptureUnmatched);
    const bool is_own = capture->thread == std::this_thread::get_id();
    require(is_own || capture->mode == cudaStreamCaptureModeRelaxed,
            cudaErrorStreamCaptureWrongThread);
    const bool is_complete = is_joined(*capture);
    capture->is_active = false;
    std::erase(captures(), capture);
    for (Stream* member : capture->members) {
      member->capture = nullptr;
      member->frontier.clear();
    }
    require_valid(*capture);
    require(is_complete, cudaErrorStreamCaptureUnjoined);
    *graph = handle_of(capture->graph.release());
  });
}

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

extern "C" cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                cudaStreamCaptureStatus* status,
                                                unsigned long long* id, cudaGraph_t* graph,
                                                const cudaGraphNode_t** dependencies,
                                                const cudaGraphEdgeData** edges,
                                                size_t* num_dependencies) {
  return call_locked([&] {
    const Stream& stream = stream_of(handle);
    *status = cudaStreamCaptureStatusNone;
    if (stream.capture == nullptr) return;
    const Capture& capture = *stream.capture;
    *status = capture.why_invalid.empty() ? cudaStreamCaptureStatusActive
                                          : cudaStreamCaptureStatusInvalidated;
    if (id != nullptr) *id = capture.id;
    if (graph != nullptr) *graph = handle_of(capture.graph.get());
    if (dependencies != nullptr) *dependencies = stream.frontier.data();
    if (edges != nullptr) *edges = nullptr;
    if (num_dependencies != nullptr) *num_dependencies = stream.frontier.size();
  });
}
