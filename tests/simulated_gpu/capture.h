// Captures: what is queued on a stream, and on those that it is joined with by events, becomes a
// graph. With the rules of CUDA on what may not be called meanwhile.
#pragma once

#include <string>
#include <thread>

#include "graph.h"

namespace simulated_gpu {

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::unique_ptr<Graph> graph;
  std::vector<Stream*> members;  // streams that take part, the origin among them
  bool is_active = true;
  std::string why_invalid;  // empty while it is not
};

// A call that CUDA counts as unsafe during a capture, which fails, and spoils the capture, unless
// this thread is in relaxed mode. Takes the lock.
void refuse_while_capturing(const char* call_name);

// All others under the lock.
void invalidate(Capture& capture, const std::string& why);
// What the default stream must not do.
void refuse_beside_capture();
void add_to_capture(Stream& stream, Operation operation);
// The stream goes on after these nodes as well; it joins the capture if it is not part of it.
void join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                  const std::vector<cudaGraphNode_t>& after);

}  // namespace simulated_gpu
