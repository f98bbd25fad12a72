#include "graph.h"

#include <unistd.h>

#include <algorithm>
#include <map>

#include "capture.h"
#include "cpp/random.h"
#include "result.h"
#include "settings.h"
#include "threads.h"

namespace simulated_gpu {
namespace {

struct GraphExec {
  GraphRun run;
  CompletionPtr last;  // launches of one graph take turns
};

GraphExec& exec_of(cudaGraphExec_t handle) { return *reinterpret_cast<GraphExec*>(handle); }

// Handles of user objects are counted apart from the object.
struct UserHandle {
  std::shared_ptr<UserObject> object;
  unsigned num_references;
};
UserHandle& user_handle(cudaUserObject_t handle) { return *reinterpret_cast<UserHandle*>(handle); }

// Copies as many as fit; what is wanted may be the number alone.
void give_nodes(const std::vector<cudaGraphNode_t>& nodes, cudaGraphNode_t* out, size_t* num) {
  if (out == nullptr) {
    *num = nodes.size();
    return;
  }
  for (size_t i = 0; i < *num; ++i) out[i] = i < nodes.size() ? nodes[i] : nullptr;
  *num = std::min(*num, nodes.size());
}

}  // namespace

// One launch. The threads that work on it each take a step that is ready, until none is left.
class GraphRun::Execution {
 public:
  Execution(const std::vector<Step>& steps, std::vector<Task> tasks, uint64_t seed)
      : steps_(steps), tasks_(std::move(tasks)), num_left_(steps.size()), random_(seed) {
    for (size_t i = 0; i < steps.size(); ++i) {
      num_awaited_.push_back(steps[i].num_after);
      if (steps[i].num_after == 0) ready_.push_back(i);
    }
  }

  void run() {
    work();
    // No step is left, so none of them starts another.
    for (std::thread& helper : helpers_) helper.join();
  }

 private:
  void work() {
    std::unique_lock guard(mutex_);
    for (;;) {
      if (ready_.empty() && num_left_ != 0) {
        ++num_idle_;
        changed_.wait(guard, [&] { return !ready_.empty() || num_left_ == 0; });
        --num_idle_;
      }
      if (num_left_ == 0) return;
      const size_t step = take();
      if (ready_.size() > num_idle_) {
        helpers_.push_back(start_thread([this] { work(); }));
      }
      const uint64_t nap_us = random_.below(2) * random_.below(settings().max_nap_us + 1);
      guard.unlock();
      if (nap_us != 0) usleep(static_cast<useconds_t>(nap_us));
      tasks_[step]();
      guard.lock();
      for (const size_t next : steps_[step].before) {
        if (--num_awaited_[next] == 0) ready_.push_back(next);
      }
      --num_left_;
      changed_.notify_all();
    }
  }
  size_t take() {
    std::swap(ready_[random_.below(ready_.size())], ready_.back());
    const size_t step = ready_.back();
    ready_.pop_back();
    return step;
  }

  const std::vector<Step>& steps_;
  const std::vector<Task> tasks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> num_awaited_;  // by step
  std::vector<size_t> ready_;
  size_t num_left_;
  size_t num_idle_ = 0;
  std::vector<std::thread> helpers_;
  rota::test::Random random_;
};

GraphRun::GraphRun(const Graph& graph) : user_objects_(graph.user_objects) {
  std::map<const Node*, size_t> places;
  for (const Node& node : graph.nodes) {
    places[&node] = steps_.size();
    steps_.push_back({node.operation, {}, node.after.size()});
  }
  for (const Node& node : graph.nodes) {
    for (const cudaGraphNode_t before : node.after) {
      steps_[places.at(&node_of(before))].before.push_back(places.at(&node));
    }
  }
}

Task GraphRun::make() const {
  std::vector<Task> tasks;
  for (const Step& step : steps_) tasks.push_back(step.operation.make());
  static uint64_t num_launches = 0;
  const uint64_t seed = rota::test::mix(settings().seed) + ++num_launches;
  // The launch keeps all that it needs: the graph may be destroyed while it runs.
  return [run = *this, tasks, seed] { Execution(run.steps_, tasks, seed).run(); };
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                     unsigned long long) {
  return call_locked([&] {
    *exec = reinterpret_cast<cudaGraphExec_t>(new GraphExec{GraphRun(graph_of(graph)), nullptr});
  });
}

extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  return call_locked([&] {
    GraphExec& exec = exec_of(handle);
    Stream& stream = stream_of(stream_handle);
    if (stream.capture != nullptr) fail_unsupported("the launch of a graph inside a capture");
    const Task run = exec.run.make();
    const CompletionPtr previous = exec.last;
    const Task task = [=] {
      wait_for(previous);
      run();
    };
    exec.last = submit(stream, {cudaGraphNodeTypeGraph, [=] { return task; }});
  });
}

extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return call_locked([&] { delete &exec_of(exec); });
}

extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call_locked([&] { delete &graph_of(graph); });
}

extern "C" cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t* from,
                                                const cudaGraphNode_t* to, const cudaGraphEdgeData*,
                                                size_t num) {
  return call_locked([&] {
    for (size_t i = 0; i < num; ++i) {
      auto& after = node_of(to[i]).after;
      require(std::find(after.begin(), after.end(), from[i]) == after.end(), cudaErrorInvalidValue,
              "the node comes after that one already");
      after.push_back(from[i]);
    }
  });
}

extern "C" cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num) {
  return call_locked([&] {
    std::vector<cudaGraphNode_t> all;
    for (Node& node : graph_of(graph).nodes) {
      all.push_back(reinterpret_cast<cudaGraphNode_t>(&node));
    }
    give_nodes(all, nodes, num);
  });
}

extern "C" cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                                    cudaGraphEdgeData*, size_t* num) {
  return call_locked([&] { give_nodes(node_of(node).after, nodes, num); });
}

extern "C" cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  return call_locked([&] { *type = node_of(node).operation.type; });
}

extern "C" cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data,
                                            cudaHostFn_t destroy, unsigned num_references,
                                            unsigned) {
  return call([&] {
    auto* handle = new UserHandle{std::make_shared<UserObject>(destroy, data), num_references};
    *object = reinterpret_cast<cudaUserObject_t>(handle);
  });
}

extern "C" cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned num_references) {
  return call([&] {
    UserHandle& handle = user_handle(object);
    handle.num_references -= std::min(handle.num_references, num_references);
    if (handle.num_references == 0) delete &handle;
  });
}

extern "C" cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                                 unsigned num_references, unsigned flags) {
  return call([&] {
    graph_of(graph).user_objects.push_back(user_handle(object).object);
    const bool is_moved = (flags & cudaGraphUserObjectMove) != 0;
    if (is_moved) cudaUserObjectRelease(object, num_references);
  });
}
