#include "cuda/stream_order.h"

#include <vector>

#include "transport/cuda_error.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

// The number of the graph that `stream` is being captured into; 0: none.
uint64_t capture_of(Stream stream) {
  auto status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &number), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? number : 0;
}

uint64_t id_of(Stream stream) {
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

void wait(Stream stream, cudaEvent_t event, unsigned flags = cudaEventWaitDefault) {
  check_cuda(cudaStreamWaitEvent(stream, event, flags), "cudaStreamWaitEvent");
}

void record(cudaEvent_t event, Stream stream) {
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
}

// Makes `node` depend on these as well.
void put_behind(const CapturedNodes& last, cudaGraphNode_t node) {
  const std::vector<cudaGraphNode_t> nodes(last.num, node);
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaGraphAddDependencies(last.graph, last.nodes, nodes.data(), nullptr, last.num);
#else
  const cudaError_t error =
      cudaGraphAddDependencies(last.graph, last.nodes, nodes.data(), last.num);
#endif
  check_cuda(error, "cudaGraphAddDependencies");
}

}  // namespace

CapturedNodes captured_on(Stream stream) {
  auto status = cudaStreamCaptureStatusNone;
  CapturedNodes last;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, &last.graph,
                                                     &last.nodes, nullptr, &last.num);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &last.graph, &last.nodes, &last.num);
#endif
  check_cuda(error, "cudaStreamGetCaptureInfo");
  return last;
}

// done_ is recorded at once, because a graph may be the first to wait for it.
StreamOrder::StreamOrder() : done_(make_event()), captured_done_(make_event()) {
  record(done_, nullptr);
}

StreamOrder::~StreamOrder() {
  transport::forget_error(cudaEventDestroy(done_));
  transport::forget_error(cudaEventDestroy(captured_done_));
}

// A graph waits for `done_` and records it as an external event, once each time it runs. So its
// replays are ordered with what is queued outside the graph.
uint64_t StreamOrder::enter(Stream stream) {
  const uint64_t id = id_of(stream);
  const uint64_t capture = capture_of(stream);
  if (capture != 0) has_captured_ = true;
  if (capture != last_capture_) record_node_ = nullptr;
  const bool is_in_order =
      id == last_stream_ && capture == last_capture_ && (capture != 0 || !has_captured_);
  if (!is_in_order) {
    if (capture == 0) {
      wait(stream, done_);
    } else if (capture == last_capture_) {
      wait(stream, captured_done_);
    } else {
      wait(stream, done_, cudaEventWaitExternal);
    }
  }
  last_stream_ = id;
  last_capture_ = capture;
  return capture;
}

void StreamOrder::leave(Stream stream) {
  if (last_capture_ == 0) return record(done_, stream);
  record(captured_done_, stream);
  record_in_graph(stream);
}

// One node for all collectives of the graph. Nothing waits for it: the stream goes on from the
// kernel. During capture, nodes and edges may be added to a graph but not removed
// (cudaStreamGetCaptureInfo).
void StreamOrder::record_in_graph(Stream stream) {
  const CapturedNodes last = captured_on(stream);
  if (record_node_ != nullptr) return put_behind(last, record_node_);
  check_cuda(cudaGraphAddEventRecordNode(&record_node_, last.graph, last.nodes, last.num, done_),
             "cudaGraphAddEventRecordNode");
}

bool StreamOrder::is_idle() const {
  const cudaError_t status = cudaEventQuery(done_);
  if (status == cudaErrorNotReady) {
    transport::forget_error(status);
    return false;
  }
  check_cuda(status, "cudaEventQuery");
  return true;
}

bool is_capturing(Stream stream) { return capture_of(stream) != 0; }

}  // namespace rota::cuda
