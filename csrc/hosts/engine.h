// Messages between hosts: starts and awaits them, names the peer in every error, and ends all waits
// at once when the group fails.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "hosts/connections.h"
#include "schedule/hosts.h"

namespace rota::hosts {

class Engine {
 public:
  using Clock = std::chrono::steady_clock;
  using MessageRef = Connections::MessageRef;

  // A message that has been started. Its memory must live until it has been waited for, or this
  // has been destroyed.
  class Transfer {
   public:
    Transfer() = default;  // of nothing, and done

   private:
    friend class Engine;
    Transfer(MessageRef message, int peer) : message_(std::move(message)), peer_(peer) {}
    MessageRef message_;
    int peer_ = -1;
  };

  // What a thread waits for.
  struct Awaited {
    int peer;
    std::string phase;
    Clock::time_point since;
  };

  // Letters have connections of their own, so that on a slow link no sign of life waits behind
  // data; they may be the same ones. hosts: names ranks in errors; outlives this.
  Engine(ConnectionsPtr data, ConnectionsPtr letters, const schedule::Hosts& hosts)
      : data_(std::move(data)), letters_(std::move(letters)), hosts_(hosts) {}

  // As the connections'. An empty message is not sent. Throws Error(kPeerFailed).
  Transfer send(const void* data, size_t num_bytes, int peer, int tag);
  Transfer recv(void* data, size_t num_bytes, int peer, int tag);
  // A letter from any rank; wait_any() returns which.
  Transfer recv_letter(void* data, size_t num_bytes);

  // Blocks until it is done. place: for errors, "rota.all_reduce: rank 2/4 ... (epoch 17, ...)".
  // Throws Error(kPeerFailed), Error(kTimeout) or what abort() was given.
  void wait(Transfer& transfer, std::chrono::milliseconds timeout, std::string_view prefix,
            std::string_view phase);
  // Without a timeout. Returns the sender, or none once aborted or where the connections failed.
  std::optional<int> wait_any(Transfer& transfer);

  // Ends all waits on this rank, and later ones, with this error. From any thread. Messages can
  // still be sent.
  void abort(const Error& cause);
  // What has been waited for longest; none if no thread waits.
  std::optional<Awaited> awaited() const;
  // Whether a thread waits for a message to or from one of these ranks.
  bool awaits_any(const std::vector<int>& peers) const;
  // Waits for what a group that ends still has to send, also once aborted; whether it arrives or
  // not.
  static void flush(Transfer& transfer, std::chrono::milliseconds timeout);

 private:
  // Waits with no lock held. Throws what the message or abort() throws.
  bool wait_for(const MessageRef& message, std::optional<Awaited> awaited,
                std::chrono::milliseconds timeout);
  template <typename Start>
  Transfer start(const Start& start, int peer);

  Connections& connections_for(int tag) const { return tag == kLetterTag ? *letters_ : *data_; }

  ConnectionsPtr data_;
  ConnectionsPtr letters_;
  const schedule::Hosts& hosts_;

  mutable std::mutex mutex_;
  // Guarded by it.
  std::optional<Error> cause_;
  struct Waiting {
    MessageRef message;
    std::optional<Awaited> awaited;  // none: anything
  };
  std::vector<Waiting> waiting_;  // in the order of their start
};

}  // namespace rota::hosts
