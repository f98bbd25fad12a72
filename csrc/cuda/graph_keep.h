// What CUDA graphs keep alive: a graph may be replayed when whoever captured it is gone.
#pragma once

#include <memory>

#include "cuda/launch.h"

namespace rota::cuda {

// Keeps an object as long as the graph that `stream` is being captured into, and what is made from
// that graph.
void keep_in_graph(Stream stream, std::shared_ptr<void> object);

// Destroys the objects that only graphs kept which are gone. Graphs themselves only hand them over:
// what CUDA calls at their end may not call CUDA.
void destroy_left_by_graphs();

}  // namespace rota::cuda
