// A window's ranks on other hosts, whose memory this process cannot map. core/window.h reaches them
// through this interface; hosts/remote_window.h implements it by messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/waiter.h"
#include "base/wire_format.h"

namespace rota {

// Why a rank on another host has not done what it was asked. The text names the rank; Window
// completes it to an Error.
struct RemoteFailure {
  ErrorKind kind;
  std::string text;
};

class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;

  // Each returns once the target has done it. Callers have checked the range. Waits tick
  // `observer`; throws RemoteFailure or what the observer raises.
  virtual void put(int target, uint64_t first_byte, std::span<const std::byte> data,
                   WaitObserver& observer) = 0;
  virtual void get(int target, uint64_t first_byte, std::span<std::byte> data,
                   WaitObserver& observer) = 0;
  // As Window::accumulate().
  virtual void accumulate(int target, uint64_t offset, const std::byte* data, DType dtype,
                          uint64_t num_elems, const std::optional<WireFormat>& wire,
                          WaitObserver& observer) = 0;
  virtual void signal(int target, int channel, WaitObserver& observer) = 0;
  // Asks the target whether its window is open.
  virtual bool is_open(int target, WaitObserver& observer) = 0;

  // What has happened to the target, as "has closed its window; ..."; none if nothing is known.
  // Returns at once. Waits call it in each tick, so that it can count how long a rank is silent.
  virtual std::optional<std::string> loss_of(int target) = 0;
  // "rank 3 on host 1".
  virtual std::string describe(int target) const = 0;
};

}  // namespace rota
