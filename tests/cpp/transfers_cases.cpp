// Batches of messages between ranks whose GPUs have one hardware queue each: none waits for ever.
#include <algorithm>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "random.h"
#include "schedule/direct.h"

namespace rota::test {
namespace {

constexpr int kMostRanks = 6;
constexpr int kNumBatches = 300;

struct Message {
  int source;
  int destination;
  int num_begun = 0;  // of its two ends

  bool has_ended() const { return num_begun == 2; }
};

// One end of a message, as a rank lists it.
struct Operation {
  size_t message;
  schedule::TransferTurn turn;
};

// A rank's GPU. It begins what is queued in order: a transfer once the one before it has begun, and
// once those before it on its stream have ended. Sends are one stream, receives another.
class Queue {
 public:
  Queue(std::vector<Operation> operations, std::vector<Message>& messages)
      : operations_(std::move(operations)), messages_(messages) {}

  // Returns whether one more has begun.
  bool begin_next() {
    if (num_begun_ == operations_.size()) return false;
    const Operation& next = operations_[num_begun_];
    for (size_t i = 0; i < num_begun_; ++i) {
      const bool is_same_stream = operations_[i].turn.is_send == next.turn.is_send;
      if (is_same_stream && !messages_[operations_[i].message].has_ended()) return false;
    }
    ++num_begun_;
    ++messages_[next.message].num_begun;
    return true;
  }

 private:
  std::vector<Operation> operations_;
  std::vector<Message>& messages_;
  size_t num_begun_ = 0;
};

std::vector<Message> random_messages(Random& random, int world_size) {
  std::vector<Message> messages(random.below(20));
  for (Message& message : messages) {
    message.source = random.below(world_size);
    message.destination = (message.source + 1 + random.below(world_size - 1)) % world_size;
  }
  return messages;
}

// A rank's own part of the batch, in the order of its turns. The order of a link stays.
std::vector<Operation> operations_of(int rank, int world_size,
                                     const std::vector<Message>& messages) {
  std::vector<Operation> operations;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto [source, destination, _] = messages[i];
    if (source != rank && destination != rank) continue;
    const auto num_earlier =
        std::count_if(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(i),
                      [source = source, destination = destination](const Message& earlier) {
                        return earlier.source == source && earlier.destination == destination;
                      });
    operations.push_back({i, schedule::turn_of_transfer(world_size, source, destination,
                                                        num_earlier, source == rank)});
  }
  std::sort(operations.begin(), operations.end(),
            [](const Operation& a, const Operation& b) { return a.turn < b.turn; });
  return operations;
}

void run_batch(Random& random) {
  const int world_size = 2 + random.below(kMostRanks - 1);
  std::vector<Message> messages = random_messages(random, world_size);
  std::vector<Queue> queues;
  for (int rank = 0; rank < world_size; ++rank) {
    queues.emplace_back(operations_of(rank, world_size, messages), messages);
  }
  bool goes_on = true;
  while (goes_on) {
    goes_on = false;
    for (Queue& queue : queues) goes_on |= queue.begin_next();
  }
  for (const Message& message : messages) {
    check(message.has_ended(), join("the message from rank ", message.source, " to rank ",
                                    message.destination, " of ", world_size, " waits for ever"));
  }
}

const CaseTable kCases{{"transfers_in_one_queue", [] {
                          Random random(1);
                          for (int i = 0; i < kNumBatches; ++i) run_batch(random);
                        }}};

}  // namespace
}  // namespace rota::test
