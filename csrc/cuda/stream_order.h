// Keeps the kernels of one communicator in the order in which they are queued, whichever streams
// they go to, in graphs too: two of them at the same time would use the same links.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

struct CUevent_st;
struct CUgraphNode_st;

namespace rota::cuda {

class StreamOrder {
 public:
  StreamOrder();
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Around what is queued on `stream`: it starts after all that came before, and what comes later
  // starts after it.
  void enter(Stream stream);
  void leave(Stream stream);

  // Whether all that has been queued has ended, replays of graphs as far as they have begun.
  bool is_idle() const;

 private:
  using Event = CUevent_st*;     // cudaEvent_t
  using Node = CUgraphNode_st*;  // cudaGraphNode_t

  // Has the graph that is being captured record `done_` behind what `stream` holds so far.
  void record_in_graph(Stream stream);

  Event done_ = nullptr;           // recorded behind the last one, by graphs too when they run
  Event captured_done_ = nullptr;  // the same within the graph that is being captured
  Node record_node_ = nullptr;     // of that graph, which records `done_`; null: none yet
  Stream last_stream_ = nullptr;
  uint64_t last_capture_ = 0;  // number of the graph that the last one was captured in; 0: none
  bool has_captured_ = false;  // then the host does not know which came last
};

// Whether what is queued on `stream` now goes into a graph.
bool is_capturing(Stream stream);

}  // namespace rota::cuda
