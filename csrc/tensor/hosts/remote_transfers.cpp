#include "tensor/hosts/remote_transfers.h"

#include "core/call_scope.h"
#include "cpu/copy.h"
#include "hosts/connections.h"
#include "tensor/errors.h"
#include "tensor/gil.h"

namespace rota::tensors {
namespace {

// How often a recv from any rank looks for messages of this host.
constexpr std::chrono::milliseconds kLookEvery{1};

}  // namespace

// One send or recv, and its handle.
class RemoteTransfers::Transfer final : public HostWork {
 public:
  Transfer(RemoteTransfers& transfers, Direction direction, const at::Tensor& tensor, int peer,
           int64_t tag)
      : HostWork(transfers.bridge_.rank(), op_type_of(direction), title_of(direction), {tensor},
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

  void begin_send() {
    hosts::Envelope& envelope = letter_.envelope;
    envelope.data_tag = hosts::kFirstDataTag + transfers_.num_sends_++ % hosts::kNumDataTags;
    sent_letter_ = bridge_.send(&letter_, sizeof(letter_), peer_, hosts::kLetterTag);
    data_ = bridge_.send(packed_.data(), envelope.num_bytes(), peer_,
                         static_cast<int>(envelope.data_tag));
  }

  // self: this, which the place keeps until it ends.
  void begin_recv(c10::intrusive_ptr<Transfer> self) {
    auto on_end = [this, self = std::move(self)]() mutable { take_up(std::move(self)); };
    place_ = std::make_shared<hosts::Inbox::Place>(
        hosts::Inbox::Place{.source = peer_,
                            .tag = letter_.envelope.tag,
                            .deadline = Clock::now() + bridge_.timeout(),
                            .on_end = std::move(on_end)});
    bridge_.inbox().enter(place_);
  }

  // Ends a recv from any rank, unless a message has come.
  void give_up(const Error& error) {
    const std::function<void()> on_end = bridge_.inbox().leave(place_);
    if (!on_end) return;
    place_->error = error;
    on_end();
  }

  // A task. It may hold the last reference, and the release of tensors may run what closes the
  // group, which waits for the tasks behind this one: so its thread leaves the queue first.
  std::function<void()> ending(c10::intrusive_ptr<Transfer> self) {
    return [this, self = std::move(self)] {
      std::exception_ptr exception;
      try {
        with_python_errors([this] { finish(); });
      } catch (...) {
        exception = std::current_exception();
      }
      --transfers_.num_unfinished_;
      complete(exception);
      ProgressQueue::leave();
    };
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const CallScope scope(&bridge_.local(), "Work.wait", CallScope::Kind::kWait);
    await_end(timeout);
    return true;
  }
  int sourceRank() const override { return peer_; }

 private:
  // In whatever thread ends the place. That of the bridge must not release tensors, for which it
  // would wait for Python, so the task gets the reference.
  void take_up(c10::intrusive_ptr<Transfer> self) {
    try {
      ask_for_data();
    } catch (...) {
      failure_ = std::current_exception();
    }
    std::function<void()> task = ending(std::move(self));
    try {
      transfers_.receiving_.enqueue(std::move(task));
    } catch (const Error&) {  // no thread can be had
      failure_ = std::current_exception();
      task();
    }
  }

  // At once, not in its turn: the sender waits for it, and perhaps this rank for the sender.
  void ask_for_data() {
    const hosts::Envelope& own = letter_.envelope;
    if (place_->neighbour) {
      request_ = bridge_.local().point_to_point().recv(packed_.data(),
                                                       {.tag = static_cast<uint64_t>(own.tag),
                                                        .dtype = static_cast<DType>(own.dtype),
                                                        .num_elems = own.num_elems},
                                                       *place_->neighbour);
      peer_ = bridge_.hosts().rank_at(bridge_.host(), *place_->neighbour);
    } else if (place_->arrival) {
      peer_ = place_->arrival->source;
      if (place_->arrival->early) return;
      // What disagrees is taken in and dropped, so that the sender goes on.
      const hosts::Envelope& theirs = place_->arrival->envelope;
      std::byte* to = static_cast<std::byte*>(packed_.data());
      if (!theirs.has_length_of(own)) {
        dropped_.resize(theirs.num_bytes());
        to = dropped_.data();
      }
      data_ = bridge_.recv(to, theirs.num_bytes(), peer_, static_cast<int>(theirs.data_tag));
    }
  }

  void finish() {
    if (failure_) std::rethrow_exception(failure_);
    if (direction_ == Direction::kSend) {
      bridge_.wait_outside(sent_letter_, "send");
      bridge_.wait_outside(data_, "send");
    } else if (request_) {
      bridge_.local().point_to_point().wait(*request_, CallerThread::kProgress);
      packed_.unpack();
    } else if (place_->arrival) {
      finish_recv(*place_->arrival);
    } else {
      throw *place_->error;
    }
  }

  void finish_recv(const hosts::Inbox::Arrival& arrival) {
    const hosts::Envelope& theirs = arrival.envelope;
    bridge_.wait_outside(arrival.early ? arrival.early->transfer : data_, "recv");
    if (theirs.has_length_of(letter_.envelope)) {
      if (arrival.early) {
        cpu::copy_bytes(packed_.data(), arrival.early->bytes.data(), theirs.num_bytes());
      }
      return packed_.unpack();
    }
    throw Error(ErrorKind::kMismatch,
                join("rota.recv: ranks disagree: rank ", peer_, " called send(", theirs.to_string(),
                     ", tag ", theirs.tag, "); rank ", bridge_.rank(), " called recv(",
                     letter_.envelope.to_string(), ", tag ", theirs.tag,
                     "); nothing was written: make dtype and number of elements equal"));
  }

  RemoteTransfers& transfers_;
  hosts::Bridge& bridge_;
  Direction direction_;
  int peer_;  // kAnyRank until a message matches
  Packed packed_;
  at::Storage memory_;    // so that it counts as held (heap_tensor.h)
  hosts::Letter letter_;  // of a recv: what it expects
  hosts::Engine::Transfer sent_letter_, data_;
  // Of a recv.
  hosts::Inbox::PlaceRef place_;
  RequestRef request_;              // for a message of this host
  std::vector<std::byte> dropped_;  // what is not as expected
  std::exception_ptr failure_;      // of asking for the data
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
  if (direction == Direction::kSend) {
    transfer->begin_send();
    queue_end(transfer);
  } else {
    ++num_unfinished_;
    transfer->begin_recv(transfer);
    if (peer == kAnyRank) look_for(*transfer);
  }
  if (mode == Launch::kBlocking) transfer->wait(kNoTimeout);
  return transfer;
}

void RemoteTransfers::queue_end(const c10::intrusive_ptr<Transfer>& send) {
  ++num_unfinished_;
  std::function<void()> task = send->ending(send);
  WorkRef send_before;  // released without the lock: what it holds may have finalizers
  try {
    const GilFreeLock lock(mutex_);
    sending_.enqueue(std::move(task));
    send_before = std::exchange(last_send_, send);
  } catch (const Error&) {  // no thread can be had
    task();
  }
}

void RemoteTransfers::look_for(Transfer& recv) {
  try {
    const GilFreeLock lock(mutex_);
    if (!is_looking_) looking_.enqueue([this] { look(); });
    is_looking_ = true;
  } catch (const Error& error) {  // no thread can be had
    recv.give_up(error);
  }
}

// One thread looks for all of them, in the order of their calls, so that the first gets the first
// message. It ends under the lock with which a call finds out whether there is one.
void RemoteTransfers::look() {
  hosts::Inbox& inbox = bridge_.inbox();
  while (true) {
    std::vector<hosts::Inbox::PlaceRef> places;
    {
      const GilFreeLock lock(mutex_);
      places = inbox.from_any();
      is_looking_ = !places.empty();
      if (!is_looking_) return;
    }
    for (const hosts::Inbox::PlaceRef& place : places) {
      std::optional<int> neighbour;
      std::optional<Error> error;
      try {
        neighbour = bridge_.local().point_to_point().probe(static_cast<uint64_t>(place->tag));
      } catch (const Error& failure) {
        error = failure;
      }
      if (!neighbour && !error) continue;
      const std::function<void()> on_end = inbox.leave(place);
      if (!on_end) continue;
      place->neighbour = neighbour;
      place->error = error;
      on_end();
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

// Sends end in the order of their calls.
void RemoteTransfers::finish_sends() {
  WorkRef last;
  {
    const GilFreeLock lock(mutex_);
    last = std::exchange(last_send_, nullptr);
  }
  if (!last) return;
  try {
    last->wait(kNoTimeout);
  } catch (const PythonError&) {  // its caller's
  }
}

void RemoteTransfers::close() {
  sending_.close();
  receiving_.close();
  looking_.close();
}

}  // namespace rota::tensors
