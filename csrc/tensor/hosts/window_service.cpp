#include "tensor/hosts/window_service.h"

#include "base/fork_generation.h"
#include "tensor/errors.h"
#include "tensor/gil.h"

namespace rota::tensors {

std::shared_ptr<hosts::WindowService> make_window_service(BackendPtr backend,
                                                          const std::vector<std::string>& hosts,
                                                          int rank, int number) {
  return with_python_errors([&] {
    auto service = std::make_unique<hosts::WindowService>(
        std::make_shared<TorchConnections>(std::move(backend)), schedule::Hosts(hosts), rank,
        number);
    // A forked child has a copy, but none of its threads, nor of the engine's: both would be waited
    // for.
    return std::shared_ptr<hosts::WindowService>(
        service.release(), [generation = fork_generation()](hosts::WindowService* old) {
          const GilReleased gil_released;
          if (generation == fork_generation()) delete old;
        });
  });
}

}  // namespace rota::tensors
