// Messages between hosts, over a torch process group that can send and recv (Gloo, by default). The
// only place that knows it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "tensor/hosts/tags.h"

namespace rota::tensors {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;

class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  // A message that has been started. Its memory must live until it has been waited for, or this
  // has been destroyed.
  class Transfer {
   public:
    Transfer() = default;  // of nothing, and done

   private:
    friend class Engine;
    Transfer(c10::intrusive_ptr<::c10d::Work> work, int peer, bool is_send)
        : work_(std::move(work)), peer_(peer), is_send_(is_send) {}
    c10::intrusive_ptr<::c10d::Work> work_;
    int peer_ = -1;
    bool is_send_ = false;
  };

  // What a thread waits for.
  struct Awaited {
    int peer;
    std::string phase;
    Clock::time_point since;
  };

  // Letters have a backend of their own where there are two, so that on a slow link no sign of life
  // waits behind data; it may be the same one. describe(rank) names a rank in errors.
  Engine(BackendPtr data, BackendPtr letters, std::function<std::string(int)> describe)
      : data_(std::move(data)), letters_(std::move(letters)), describe_(std::move(describe)) {}

  // Messages of one pair and tag arrive in the order of their calls, and are at most as long as
  // their recv expects. An empty message is not sent. Throws Error(kPeerFailed).
  Transfer send(const void* data, size_t num_bytes, int peer, int tag);
  Transfer recv(void* data, size_t num_bytes, int peer, int tag);
  // A letter from any rank; wait_any() returns which.
  Transfer recv_letter(void* data, size_t num_bytes);

  // Blocks until it is done. place: for errors, "rota.all_reduce: rank 2/4 ... (epoch 17, ...)".
  // Throws Error(kPeerFailed), Error(kTimeout) or what abort() was given.
  void wait(Transfer& transfer, std::chrono::milliseconds timeout, std::string_view prefix,
            std::string_view phase);
  // Without a timeout. Returns the sender, or none once aborted or where the backend failed.
  std::optional<int> wait_any(Transfer& transfer);

  // Ends all waits on this rank, and later ones, with this error. From any thread. Messages can
  // still be sent.
  void abort(const Error& cause);
  // What has been waited for longest; none if no thread waits.
  std::optional<Awaited> awaited() const;
  // Waits for what a group that ends still has to send, also once aborted; whether it arrives or
  // not.
  static void flush(Transfer& transfer, std::chrono::milliseconds timeout);

 private:
  // Waits with no lock held. Throws what the work or abort() throws.
  bool wait_for(const c10::intrusive_ptr<::c10d::Work>& work, std::optional<Awaited> awaited,
                std::chrono::milliseconds timeout);
  template <typename Start>
  Transfer start(const Start& start, int peer, bool is_send);

  ::c10d::Backend& backend_for(int tag) const { return tag == kLetterTag ? *letters_ : *data_; }

  BackendPtr data_;
  BackendPtr letters_;
  std::function<std::string(int)> describe_;

  mutable std::mutex mutex_;
  // Guarded by it.
  std::optional<Error> cause_;
  struct Waiting {
    c10::intrusive_ptr<::c10d::Work> work;
    std::optional<Awaited> awaited;  // none: anything
  };
  std::vector<Waiting> waiting_;  // in the order of their start
};

}  // namespace rota::tensors
