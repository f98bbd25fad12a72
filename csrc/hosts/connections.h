// What carries messages between the ranks of a group on several hosts: a torch process group
// (tensor/hosts/torch_connections.h), or memory in the tests.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace rota::hosts {

// The tags of messages. The engine is rota's alone.
inline constexpr int kLetterTag = 0;
inline constexpr int kGreetingTag = 1;      // a call, to be compared
inline constexpr int kContributionTag = 2;  // what a rank's partner sums
inline constexpr int kResultTag = 3;        // what is final

// Windows have one tag for each service over an engine, so that none takes another's packets.
inline constexpr int kFirstWindowTag = 1 << 26;

// Sends take the tags of their data in turn, so that recvs at the same time do not mix them up.
inline constexpr int64_t kFirstDataTag = 16;
inline constexpr int64_t kNumDataTags = 1 << 24;

// Longer than any job: abort() ends such waits.
inline constexpr std::chrono::hours kForever{24 * 365};

class Connections {
 public:
  // One that has been started. Errors are a std::exception whose text is the cause.
  class Message {
   public:
    virtual ~Message() = default;
    // Blocks until it is done, and returns whether it is. Throws where it has failed, was aborted
    // or the timeout is over; its memory is free from then on.
    virtual bool wait(std::chrono::milliseconds timeout) = 0;
    // Ends waits for it. From any thread. Where these connections cannot, their own timeout does.
    virtual void abort() = 0;
    // The sender of one that is done.
    virtual int source() const = 0;
  };
  using MessageRef = std::shared_ptr<Message>;

  virtual ~Connections() = default;

  // Messages of one pair and tag arrive in the order of their calls, and are at most as long as
  // their recv expects. All throw where the connection is broken.
  virtual MessageRef send(const void* data, size_t num_bytes, int peer, int tag) = 0;
  virtual MessageRef recv(void* data, size_t num_bytes, int peer, int tag) = 0;
  virtual MessageRef recv_from_any(void* data, size_t num_bytes, int tag) = 0;
};

using ConnectionsPtr = std::shared_ptr<Connections>;

}  // namespace rota::hosts
