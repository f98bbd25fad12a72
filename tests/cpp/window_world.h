// Windows of ranks that are threads, in plain memory; a network in memory lies between hosts.
#pragma once

#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/window.h"
#include "hosts/remote_window.h"
#include "hosts/window_service.h"
#include "letters.h"
#include "memory_network.h"
#include "ranks.h"

namespace rota::test {

inline constexpr uint64_t kWindowNumber = 7;

// One rank's window. What reaches other hosts is null where all ranks are on one.
struct WindowRank {
  int rank;
  Window& window;
  hosts::RemoteWindow* remote;
};

class WindowWorld {
 public:
  // letters: the host of each rank (letters.h). A rank uses the memory of its host's ranks only.
  WindowWorld(std::string_view letters, size_t num_bytes, int num_channels = 1,
              DType dtype = DType::kFloat32)
      : hosts_(hosts_of(letters)),
        num_bytes_(num_bytes),
        num_channels_(num_channels),
        dtype_(dtype),
        num_words_(Window::num_words(hosts_.world_size(), num_channels)),
        network_(MemoryNetwork::Kind::kData),
        all_(hosts_.world_size()) {
    const size_t control_lines = transport::WindowControl::num_bytes(num_words_) / sizeof(Flag);
    for (int rank = 0; rank < hosts_.world_size(); ++rank) {
      controls_.emplace_back(control_lines);
      data_.emplace_back(num_bytes);
    }
  }

  int world_size() const { return hosts_.world_size(); }
  MemoryNetwork& network() { return network_; }
  transport::WindowControl& control(int rank) {
    auto& lines = controls_[static_cast<size_t>(rank)];
    return *reinterpret_cast<transport::WindowControl*>(lines.data());
  }
  template <typename T>
  T* data(int rank) {
    return reinterpret_cast<T*>(data_[static_cast<size_t>(rank)].data());
  }

  // A rank's window; of several hosts with `remote`, which the caller opens.
  std::unique_ptr<Window> window(int rank, std::shared_ptr<hosts::RemoteWindow> remote = nullptr) {
    std::vector<RankWindow> ranks;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (hosts_.place_of(peer).host == hosts_.place_of(rank).host) {
        ranks.push_back({.view = {&control(peer), num_words_, data_[static_cast<size_t>(peer)]}});
      } else {
        std::byte* const nowhere = nullptr;
        ranks.push_back({.view = {.data = {nowhere, num_bytes_}}, .is_remote = true});
      }
    }
    return std::make_unique<Window>(rank, std::move(ranks), num_channels_,
                                    Window::Options{.timeout = kPatience, .check_interrupt = [] {}},
                                    std::move(remote));
  }

  // Runs body on every rank; no rank leaves before all are done.
  void run(const std::function<void(WindowRank&)>& body) {
    run_threads(world_size(), [&](int rank) { run_rank(rank, body); });
  }

  // Until all ranks are here.
  void rendezvous() { all_.arrive_and_wait(); }

 private:
  void run_rank(int rank, const std::function<void(WindowRank&)>& body) {
    std::optional<hosts::WindowService> service;
    std::shared_ptr<hosts::RemoteWindow> remote;
    if (hosts_.num_hosts() > 1) {
      service.emplace(network_.connect(rank), hosts_, rank, 0);
      remote = std::make_shared<hosts::RemoteWindow>(*service, kWindowNumber, dtype_);
    }
    const auto window = this->window(rank, remote);
    if (remote) remote->open(remote, *window);
    const auto close = [&] {
      if (remote) remote->close();
    };
    rendezvous();
    WindowRank self{rank, *window, remote.get()};
    try {
      body(self);
      rendezvous();
    } catch (...) {
      all_.arrive_and_drop();
      close();
      throw;
    }
    control(rank).closed.publish(1);
    close();
  }

  const schedule::Hosts hosts_;
  const size_t num_bytes_;
  const int num_channels_;
  const DType dtype_;
  const uint64_t num_words_;
  std::vector<std::vector<Flag>> controls_;
  std::vector<std::vector<std::byte>> data_;
  MemoryNetwork network_;
  std::barrier<> all_;
};

}  // namespace rota::test
