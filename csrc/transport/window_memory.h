// The memory of one rank's window, which other processes of the host map by its address whenever
// they like: data in this process's heap (transport/heap.h), and control words beside it. They take
// no part in any group, and a process that ends takes nothing with it but its own part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/flag.h"
#include "transport/layout.h"
#include "transport/listener.h"
#include "transport/mapping.h"
#include "transport/peer_processes.h"

namespace rota::transport {

inline constexpr uint64_t kNumWindowLocks = 64;

// Every word is 0 at rest. Where openers may write, a word has one writer at a time.
struct WindowControl {
  Flag sleeping;                // 1 while the owner sleeps on a flag, then 0 again
  Flag closed;                  // 1 once the owner has closed the window
  Flag locks[kNumWindowLocks];  // core/window.cpp: the holder writes
  // The words behind it are for whoever uses the window.

  static constexpr size_t num_bytes(uint64_t num_words) {
    return sizeof(WindowControl) + num_words * sizeof(Flag);
  }
  Flag& word(uint64_t index) { return reinterpret_cast<Flag*>(this + 1)[index]; }
};

enum class WindowAccess : uint8_t { kRead, kWrite };

// A window as one process sees it.
struct WindowView {
  WindowControl* control;
  uint64_t num_words;
  std::span<std::byte> data;
};

// This process's window.
class WindowMemory final : private Exposed {
 public:
  // data: in the heap; it must stay allocated as long as this lives. access: of others. Throws
  // Error(kTransport).
  WindowMemory(std::span<std::byte> data, uint64_t num_words, WindowAccess access);
  // Closes it. Those who have opened it keep their mapping, and until they end it, its place in the
  // heap is not used again.
  ~WindowMemory();
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  // Marks the window as closed; nobody can open it any more. Idempotent.
  void close();
  // Keeps something else until nobody maps the window any more.
  void keep(std::shared_ptr<void> other) { kept_ = std::move(other); }
  // What open() takes.
  std::string address() const;
  WindowView view() const { return {control_, num_words_, data_}; }

 private:
  void answer(UniqueFd& connection, ReceivedHello& received) override;

  const std::span<std::byte> data_;
  const uint64_t num_words_;
  const WindowAccess access_;
  const uint64_t fork_generation_;
  const uint64_t token_;
  WindowControl* control_;
  std::shared_ptr<void> kept_;
  std::vector<UniqueFd> openers_;  // guarded by the listener's mutex; each hangs up at its end
  std::shared_ptr<Listener> listener_;
};

// Another process's window.
class OpenedWindow {
 public:
  // who: its owner, in errors. check runs several times a second and may throw. Throws
  // Error(kTransport) if the owner has ended or has closed the window.
  static std::shared_ptr<OpenedWindow> open(const std::string& address, const std::string& who,
                                            const std::function<void()>& check);

  OpenedWindow(std::shared_ptr<const PeerProcess> process, UniqueFd connection, Mapping control,
               Mapping data, const WindowView& view);

  const PeerProcess& process() const { return *process_; }
  // Read-only unless its owner lets others write.
  const WindowView& view() const { return view_; }

 private:
  std::shared_ptr<const PeerProcess> process_;
  UniqueFd connection_;  // tells the owner how long this process maps its window
  Mapping control_;
  Mapping data_;
  WindowView view_;
};

}  // namespace rota::transport
