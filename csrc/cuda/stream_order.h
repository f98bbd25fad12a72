// Runs the kernels of one communicator in the order in which they are queued, on any stream and in
// graphs, because two at the same time would use the same links.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;

namespace rota::cuda {

class StreamOrder {
 public:
  StreamOrder();
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Call these around what is queued on `stream`: it starts after everything queued before, and
  // what is queued later starts after it.
  // enter() returns the number of the graph that the stream is being captured into; 0: none.
  uint64_t enter(Stream stream);
  void leave(Stream stream);

  // Whether everything queued has finished, including graph replays that have begun.
  bool is_idle() const;

 private:
  using Event = CUevent_st*;     // cudaEvent_t
  using Node = CUgraphNode_st*;  // cudaGraphNode_t

  // Makes the graph that is being captured record `done_` after what `stream` holds so far.
  void record_in_graph(Stream stream);

  Event done_ = nullptr;           // recorded after the last one; graphs record it when they run
  Event captured_done_ = nullptr;  // the same within the graph that is being captured
  Node record_node_ = nullptr;     // the node of that graph that records `done_`; null: none yet
  // By its number, which is never used again; another stream may get its handle once it is
  // destroyed, and its work may not be done by then.
  uint64_t last_stream_ = 0;
  uint64_t last_capture_ = 0;  // number of the graph that the last one was captured in; 0: none
  bool has_captured_ = false;  // if so, the host does not know which came last
};

// Whether `stream` is being captured into a graph.
bool is_capturing(Stream stream);

// What a stream that is being captured adds to: the graph, and the nodes that its next work will
// depend on.
struct CapturedNodes {
  CUgraph_st* graph = nullptr;             // cudaGraph_t
  CUgraphNode_st* const* nodes = nullptr;  // const cudaGraphNode_t*
  size_t num = 0;
};
CapturedNodes captured_on(Stream stream);

}  // namespace rota::cuda
