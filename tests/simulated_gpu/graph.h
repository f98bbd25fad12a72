// Graphs: operations, and which come after which.
#pragma once

#include <deque>

#include "streams.h"

namespace simulated_gpu {

struct Node {
  Operation operation;
  std::vector<cudaGraphNode_t> after;
};

struct UserObject {
  ~UserObject() { destroy(data); }
  cudaHostFn_t destroy;
  void* data;
};

struct Graph {
  std::deque<Node> nodes;  // which stay where they are
  std::vector<std::shared_ptr<UserObject>> user_objects;

  cudaGraphNode_t add(Operation operation, std::vector<cudaGraphNode_t> after) {
    nodes.push_back({std::move(operation), std::move(after)});
    return reinterpret_cast<cudaGraphNode_t>(&nodes.back());
  }
};

inline Node& node_of(cudaGraphNode_t handle) { return *reinterpret_cast<Node*>(handle); }
inline cudaGraph_t handle_of(Graph* graph) { return reinterpret_cast<cudaGraph_t>(graph); }
inline Graph& graph_of(cudaGraph_t handle) { return *reinterpret_cast<Graph*>(handle); }

// What a launch of a graph does, apart from what it waits for.
class GraphRun {
 public:
  explicit GraphRun(const Graph& graph);

  // Makes all operations' tasks, under the runtime's lock, and one of them all: nodes run as soon
  // as what they come after is done, in a random order, beside each other.
  Task make() const;

 private:
  struct Step {
    Operation operation;
    std::vector<size_t> before;  // which steps come after this one
    size_t num_after;
  };
  class Execution;

  std::vector<Step> steps_;
  std::vector<std::shared_ptr<UserObject>> user_objects_;
};

}  // namespace simulated_gpu
