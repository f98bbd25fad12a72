// One window of ranks on several hosts: asks ranks of other hosts for what core/window.h wants of
// them, cut into packets, and serves what they ask of this rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "core/window.h"
#include "hosts/window_service.h"

namespace rota::hosts {

class RemoteWindow final : public RemoteRanks {
 public:
  // number: of the window; its ranks agree on it, and the service has no other with it. The service
  // must outlive all but the destructor, which may run in a thread of the service.
  RemoteWindow(WindowService& service, uint64_t number, DType dtype)
      : service_(service),
        number_(number),
        dtype_(dtype),
        has_closed_(static_cast<size_t>(service.hosts().world_size())) {}

  // From now on serves others. self: this. window must outlive close().
  void open(const std::shared_ptr<RemoteWindow>& self, Window& window);
  // Serves nobody any more, once what is being served has been answered, and tells the others,
  // which so hear it after the answer. Idempotent.
  void close();

  void put(int target, uint64_t first_byte, std::span<const std::byte> data,
           WaitObserver& observer) override;
  void get(int target, uint64_t first_byte, std::span<std::byte> data,
           WaitObserver& observer) override;
  void accumulate(int target, uint64_t offset, const std::byte* data, DType dtype,
                  uint64_t num_elems, const std::optional<WireFormat>& wire,
                  WaitObserver& observer) override;
  void signal(int target, int channel, WaitObserver& observer) override;
  bool is_open(int target, WaitObserver& observer) override;
  std::optional<std::string> loss_of(int target) override;
  std::string describe(int target) const override { return service_.describe(target); }

  // As WindowPeer::Serve. Called by several threads.
  size_t serve(int source, WindowPeer::Request& request);

 private:
  WindowPacket packet(WindowPacket::Kind kind) const { return {.kind = kind, .window = number_}; }
  void ask(int target, const WindowPacket& packet, WaitObserver& observer);
  size_t serve_open(int source, WindowPeer::Request& request);
  void serve_accumulate(WindowPeer::Request& request);

  WindowService& service_;
  const uint64_t number_;
  const DType dtype_;
  std::vector<std::atomic<bool>> has_closed_;  // by rank
  std::shared_mutex mutex_;  // shared by those who use the window, which close() ends
  Window* window_ = nullptr;
};

}  // namespace rota::hosts
