#include "tensor/hosts/remote_transfers.h"

#include <optional>

#include "core/call_scope.h"
#include "cpu/copy.h"
#include "hosts/tags.h"
#include "tensor/errors.h"
#include "tensor/gil.h"
#include "tensor/request_work.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

// How often a recv from any rank looks for messages of this host.
constexpr std::chrono::milliseconds kLookEvery{1};

template <typename T, typename Predicate>
void take_if(std::list<T>& from, std::list<T>& to, const Predicate& is_taken) {
  for (auto next = from.begin(); next != from.end();) {
    const auto one = next++;
    if (is_taken(*one)) to.splice(to.end(), from, one);
  }
}

}  // namespace

// One send or recv, and its handle.
class RemoteTransfers::Transfer final : public HostWork {
 public:
  Transfer(RemoteTransfers& transfers, Direction direction, const at::Tensor& tensor, int peer,
           int64_t tag)
      : HostWork(transfers.bridge_.rank(),
                 direction == Direction::kSend ? ::c10d::OpType::SEND : ::c10d::OpType::RECV,
                 direction == Direction::kSend ? "rota:send" : "rota:recv", {tensor},
                 transfers.check_interrupt_),
        transfers_(transfers),
        bridge_(transfers.bridge_),
        direction_(direction),
        peer_(peer),
        packed_(tensors_[0], direction == Direction::kSend ? Packed::Content::kRead
                                                           : Packed::Content::kOverwritten),
        memory_(tensor.storage()),
        letter_{.kind = hosts::Letter::Kind::kEnvelope,
                .envelope = {.tag = tag,
                             .dtype = static_cast<uint64_t>(movable_dtype(tensor, name(direction))),
                             .num_elems = num_elems(tensor)}} {}

  // What must happen in the order of the calls.
  void begin() {
    hosts::Envelope& envelope = letter_.envelope;
    if (direction_ == Direction::kRecv) {
      place_ = bridge_.inbox().enter(peer_, envelope.tag);
      return;
    }
    envelope.data_tag = hosts::kFirstDataTag + transfers_.num_sends_++ % hosts::kNumDataTags;
    sent_letter_ = bridge_.send(&letter_, sizeof(letter_), peer_, hosts::kLetterTag);
    data_ = bridge_.send(packed_.data(), envelope.num_bytes(), peer_,
                         static_cast<int>(envelope.data_tag));
  }

  void run() {
    if (direction_ == Direction::kSend) {
      bridge_.wait_outside(sent_letter_, "send");
      bridge_.wait_outside(data_, "send");
    } else if (const auto arrival = peer_ == kAnyRank ? await_any() : await()) {
      recv(*arrival);
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const CallScope scope(&bridge_.local(), "Work.wait", CallScope::Kind::kWait);
    await_end(timeout);
    return true;
  }
  int sourceRank() const override { return peer_; }

 private:
  hosts::Inbox::Arrival await() {
    if (const auto arrival = bridge_.inbox().wait(*place_, bridge_.timeout())) return *arrival;
    fail_of_timeout();
  }

  // Returns none if a message of this host came first, and has been received.
  std::optional<hosts::Inbox::Arrival> await_any() {
    const auto end = Clock::now() + bridge_.timeout();
    while (Clock::now() < end) {
      if (const auto arrival = bridge_.inbox().wait(*place_, kLookEvery)) return arrival;
      if (recv_of_this_host()) return std::nullopt;
    }
    fail_of_timeout();
  }

  bool recv_of_this_host() {
    const auto tag = static_cast<uint64_t>(letter_.envelope.tag);
    RequestRef request;
    const PackedMessage message(direction_, tensors_[0]);
    {
      const GilFreeLock lock(transfers_.any_mutex_);
      const std::optional<int> sender = bridge_.local().point_to_point().probe(tag);
      if (!sender || !bridge_.inbox().leave(place_)) return false;
      request = message.start(bridge_.local(), *sender, tag);
      peer_ = bridge_.hosts().rank_at(bridge_.host(), *sender);
    }
    bridge_.local().point_to_point().wait(*request, CallerThread::kProgress);
    message.unpack();
    return true;
  }

  void recv(const hosts::Inbox::Arrival& arrival) {
    peer_ = arrival.source;
    const hosts::Envelope& theirs = arrival.envelope;
    const bool is_as_expected = theirs.has_length_of(letter_.envelope);
    if (arrival.early) {
      bridge_.wait_outside(arrival.early->transfer, "recv");
      if (is_as_expected) {
        cpu::copy_bytes(packed_.data(), arrival.early->bytes.data(), theirs.num_bytes());
      }
    } else {
      // What disagrees is taken in and dropped, so that the sender goes on.
      std::vector<std::byte> dropped(is_as_expected ? 0 : theirs.num_bytes());
      data_ = bridge_.recv(is_as_expected ? packed_.data() : dropped.data(), theirs.num_bytes(),
                           peer_, static_cast<int>(theirs.data_tag));
      bridge_.wait_outside(data_, "recv");
    }
    if (is_as_expected) return packed_.unpack();
    throw Error(ErrorKind::kMismatch,
                join("rota.recv: ranks disagree: rank ", peer_, " called send(", theirs.to_string(),
                     ", tag ", theirs.tag, "); rank ", bridge_.rank(), " called recv(",
                     letter_.envelope.to_string(), ", tag ", theirs.tag,
                     "); nothing was written: make dtype and number of elements equal"));
  }

  [[noreturn]] void fail_of_timeout() {
    const std::string who = peer_ == kAnyRank ? "any other rank" : bridge_.describe(peer_);
    const Error error(
        ErrorKind::kTimeout,
        join(bridge_.prefix("recv"), " waited ", bridge_.timeout().count(), " ms for ", who,
             " (tag ", letter_.envelope.tag, "), the timeout of this call; has it called send?"));
    bridge_.fail(error);
    throw error;
  }

  RemoteTransfers& transfers_;
  hosts::Bridge& bridge_;
  Direction direction_;
  int peer_;  // kAnyRank until a message matches
  Packed packed_;
  at::Storage memory_;    // so that it counts as held (heap_tensor.h)
  hosts::Letter letter_;  // of a recv: what it expects
  hosts::Inbox::PlaceRef place_;
  hosts::Engine::Transfer sent_letter_, data_;
};

void RemoteTransfers::check(Direction direction, const at::Tensor& tensor, int peer,
                            int64_t tag) const {
  check_tensor(tensor, name(direction));
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::kValue, join("rota.", name(direction), ": ", what));
  };
  const bool is_any = direction == Direction::kRecv && peer == kAnyRank;
  if (!is_any && (peer < 0 || peer >= bridge_.world_size())) {
    refuse(join("the peer is ", peer, ", expected a rank in [0, ", bridge_.world_size(), ")"));
  }
  if (tag < 0) refuse(join("tag is ", tag, ", expected 0 or more"));
}

WorkRef RemoteTransfers::start(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                               Launch mode) {
  bridge_.check_usable(name(direction));
  check(direction, tensor, peer, tag);
  const auto transfer = c10::make_intrusive<Transfer>(*this, direction, tensor, peer, tag);
  transfer->begin();
  ++num_unfinished_;
  const auto job = [this, transfer] {
    std::exception_ptr exception;
    try {
      with_python_errors([&] { transfer->run(); });
    } catch (...) {
      exception = std::current_exception();
    }
    --num_unfinished_;
    transfer->complete(exception);
  };
  // Released without the lock: what they hold may have finalizers.
  std::list<ProgressQueue> ended;
  std::list<WorkRef> completed;
  {
    const GilFreeLock lock(mutex_);
    take_if(threads_, ended, [](const ProgressQueue& thread) { return thread.has_ended(); });
    take_if(sends_, completed, [](const WorkRef& send) { return send->isCompleted(); });
    threads_.emplace_back().enqueue(job);
    if (direction == Direction::kSend) sends_.push_back(transfer);
  }
  if (mode == Launch::kBlocking) transfer->wait(kNoTimeout);
  return transfer;
}

void RemoteTransfers::finish_sends() {
  std::list<WorkRef> sends;
  {
    const GilFreeLock lock(mutex_);
    sends.swap(sends_);
  }
  for (const WorkRef& send : sends) {
    try {
      send->wait(kNoTimeout);
    } catch (const PythonError&) {  // its caller's
    }
  }
}

void RemoteTransfers::close() {
  std::list<ProgressQueue> threads;
  {
    const GilFreeLock lock(mutex_);
    threads.swap(threads_);
  }
  for (ProgressQueue& thread : threads) thread.close();
}

}  // namespace rota::tensors
