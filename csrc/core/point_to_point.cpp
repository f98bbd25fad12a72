#include "core/point_to_point.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <new>
#include <string_view>
#include <utility>

#include "base/fork_generation.h"
#include "base/per_process.h"
#include "core/communicator.h"
#include "cpu/copy.h"
#include "schedule/direct.h"

namespace rota {
namespace {

using Clock = std::chrono::steady_clock;

// How long a borrowed thread stays when nothing is outstanding: longer than the gap between two
// steps of a pipeline, because waking a thread costs more than sending a short message.
constexpr auto kLinger = std::chrono::milliseconds(100);

// The start of a message's first link message.
struct alignas(kCacheLineBytes) Header {
  uint64_t tag;
  uint64_t dtype;
  uint64_t num_elems;
};

// The bytes of a message that travel together, with its header. What fits in one slot is cut, so
// that the receiver copies a piece while the sender copies the next one; longer messages fill
// several slots anyway. Both compute it.
uint64_t piece_bytes(const Message& message, uint64_t slot_bytes) {
  constexpr uint64_t kShortest = 4096 + sizeof(Header);
  constexpr uint64_t kNumPieces = 8;
  const uint64_t num_bytes = message.num_bytes() + sizeof(Header);
  if (num_bytes <= kShortest || message.num_bytes() > slot_bytes) return slot_bytes;
  const uint64_t part = schedule::ceil_div(num_bytes, kNumPieces * kCacheLineBytes);
  return std::max(kShortest, part * kCacheLineBytes);
}

void check_header(const Header& header, int source) {
  // Checks the ranges, because the words come from another process.
  constexpr uint64_t kMaxElems = uint64_t{1} << 56;
  if (header.dtype < kNumDTypes && header.num_elems < kMaxElems) return;
  throw Error(ErrorKind::kInternal, join("rota.recv: the header of a message from rank ", source,
                                         " is damaged; does another program write to its memory?"));
}

std::string text_of(const Message& message) {
  return join("(", name(message.dtype), '[', message.num_elems, "], tag ", message.tag, ')');
}

Nanoseconds now() { return Clock::now().time_since_epoch(); }

// All open groups of this process. A thread that holds the mutex never blocks on another one.
struct Living {
  std::mutex mutex;
  std::vector<PointToPoint*> groups;
};

// "tag 7", formatted without a slow stream, because every wait for a short message needs it.
class TagText {
 public:
  explicit TagText(uint64_t tag) {
    end_ = std::to_chars(text_ + kPrefix.size(), std::end(text_), tag).ptr;
    kPrefix.copy(text_, kPrefix.size());
  }
  operator std::string_view() const { return {text_, end_}; }

 private:
  static constexpr std::string_view kPrefix = "tag ";
  char text_[kPrefix.size() + 20];
  char* end_;
};

}  // namespace

// Ends a wait for flags with an error when the request makes no progress for the group's timeout or
// the group has failed.
class PointToPoint::Observer final : public WaitObserver {
 public:
  Observer(Watch& watch, const Request& request) : watch_(watch), request_(request) {}

  std::optional<Error> poll() override { return watch_.poll(); }
  std::optional<Error> tick(Nanoseconds waited) override {
    const Nanoseconds time = now();
    if (!start_) start_ = time - waited;
    // Measured since the request last moved: another thread may move it, and a wait also ends when
    // other messages arrive.
    return watch_.tick(time - std::max(*start_, request_.moved_at_.load()));
  }

 private:
  Watch& watch_;
  const Request& request_;
  std::optional<Nanoseconds> start_;  // known from the first tick on: reading the clock takes time
};

PointToPoint::PointToPoint(Communicator& communicator, transport::Transport& transport,
                           std::function<void()> check_interrupt)
    : communicator_(communicator),
      transport_(transport),
      check_interrupt_(std::move(check_interrupt)),
      waiter_(&transport.own_control().sleeping_on_links,
              transport.peers_flags(&transport::ControlBlock::sleeping_on_links)),
      policy_(WaitPolicy::for_ranks(transport.world_size())),
      links_(transport, waiter_),
      sends_(static_cast<size_t>(transport.world_size())),
      arriving_(static_cast<size_t>(transport.world_size())),
      fork_generation_(fork_generation()) {
  Living& living = per_process<Living>();
  const std::lock_guard lock(living.mutex);
  living.groups.push_back(this);
}

RequestRef PointToPoint::send(const void* data, const Message& message, int peer, OnDone on_done) {
  // A send only reads its data.
  return start(Direction::kSend, const_cast<void*>(data), message, peer, std::move(on_done));
}

RequestRef PointToPoint::recv(void* data, const Message& message, int peer, OnDone on_done) {
  return start(Direction::kRecv, data, message, peer, std::move(on_done));
}

RequestRef PointToPoint::start(Direction direction, void* data, const Message& message, int peer,
                               OnDone on_done) {
  const std::string_view call = name(direction);
  communicator_.check_usable(call);
  const bool is_any =
      direction == Direction::kRecv && peer == kAnyRank && transport_.world_size() > 1;
  if (!is_any && (peer < 0 || peer >= transport_.world_size() || peer == transport_.rank())) {
    throw Error(ErrorKind::kValue, join("rota.", call, ": the peer is ", peer,
                                        ", expected another rank than the own, ", transport_.rank(),
                                        ", in [0, ", transport_.world_size(), ")"));
  }
  auto request = std::make_shared<Request>();
  request->direction_ = direction;
  request->peer_ = peer;
  request->message_ = message;
  request->data_ = static_cast<std::byte*>(data);
  request->on_done_ = std::move(on_done);
  Done done;
  {
    const std::lock_guard lock(mutex_);
    request->number_ = ++num_requests_;
    ++num_unfinished_;
    try {
      if (direction == Direction::kSend) {
        sends_[static_cast<size_t>(peer)].push_back(request);
        links_.open(peer);
      } else if (!take_early(request, done)) {
        recvs_.push_back(request);
      }
      move(done);
    } catch (const Error& error) {
      fail(error, done);
    }
  }
  report(done);
  return request;
}

bool PointToPoint::test(const Request& request) {
  Done done;
  {
    const std::lock_guard lock(mutex_);
    try {
      move(done);
      if (!request.is_done()) communicator_.check_usable(name(request.direction_));
    } catch (const Error& error) {
      fail(error, done);
    }
  }
  report(done);
  return request.is_done();
}

bool PointToPoint::wait(const Request& request, CallerThread thread,
                        std::optional<Nanoseconds> patience) {
  if (!request.is_done() && !wait_until_done(request, thread, patience)) return false;
  if (request.error()) throw *request.error();
  return true;
}

bool PointToPoint::wait_until_done(const Request& request, CallerThread thread,
                                   std::optional<Nanoseconds> patience) {
  Watch watch(transport_, communicator_.timeout(), check_interrupt_);
  watch.begin_collective(name(request.direction_), request.number_,
                         /*lets_signals_through=*/thread == CallerThread::kUser);
  const Nanoseconds start = patience ? now() : Nanoseconds();
  Observer observer(watch, request);
  bool is_patient = true;
  const TagText phase(request.message_.tag);
  std::unique_lock lock(mutex_);
  ++num_waits_;
  ++num_waiting_;
  Done done;
  try {
    for (move(done); is_patient && !request.is_done(); move(done)) {
      AwaitedFlags flags = awaited();
      watch.begin_wait(request.peer_, phase, request.num_moved_);
      lock.unlock();
      report(done);
      done.clear();
      const auto patience_left =
          patience ? std::optional(*patience - (now() - start)) : std::nullopt;
      is_patient = waiter_.wait_any(flags.all(), policy_, observer, patience_left);
      lock.lock();
    }
  } catch (const Error& error) {
    if (!lock.owns_lock()) lock.lock();
    fail(error, done);
  } catch (...) {  // from a signal handler
    if (!lock.owns_lock()) lock.lock();
    --num_waiting_;
    const std::string text = join(watch.prefix(), " was interrupted ", watch.place());
    communicator_.abort(text);
    end_all(Error(ErrorKind::kInternal, text), done);
    lock.unlock();
    report(done);
    throw;
  }
  --num_waiting_;
  lock.unlock();
  report(done);
  return request.is_done();
}

void PointToPoint::move_all_groups() {
  Done done;
  {
    Living& living = per_process<Living>();
    const std::lock_guard lock(living.mutex);
    for (PointToPoint* group : living.groups) {
      // The thread that holds the mutex moves messages already.
      const std::unique_lock own_lock(group->mutex_, std::try_to_lock);
      if (!own_lock.owns_lock()) continue;
      try {
        group->move(done);
      } catch (const Error& error) {
        group->fail(error, done);
      }
    }
  }
  report(done);
}

void PointToPoint::attend(const Request& request, std::shared_ptr<void> owner) {
  const std::lock_guard lock(mutex_);
  if (request.is_done() || is_attended_ || is_closing_) return;
  is_attended_ = true;
  attendant_queue_.enqueue([this, owner = std::move(owner)] { attend_all(); });
}

// A waiting thread moves all messages, and sooner than this one. So this thread only looks now and
// then, and steps in after a whole tick in which nobody waited.
void PointToPoint::attend_all() {
  std::unique_lock lock(mutex_);
  Nanoseconds used_at = now();
  while (!is_closing_ && (num_unfinished_ > 0 || now() - used_at < kLinger)) {
    if (num_unfinished_ > 0) used_at = now();
    const uint64_t num_waits = num_waits_;
    attendant_->wait_for(lock, kTick, [this] { return is_closing_; });
    while (!is_closing_ && num_unfinished_ > 0 && num_waiting_ == 0 && num_waits == num_waits_) {
      if (!step_in(lock)) break;
    }
  }
  is_attended_ = false;
}

// Moves what can be moved, then waits for more for about a tick. Returns false if nothing came.
bool PointToPoint::step_in(std::unique_lock<std::mutex>& lock) {
  Watch watch(transport_, communicator_.timeout(), check_interrupt_);
  watch.begin_collective("send_recv", num_requests_, /*lets_signals_through=*/false);
  Done done;
  try {
    move(done);
    watch.begin_wait_for_all(needed_peers(), "attended", 0);
    AwaitedFlags flags = awaited();
    lock.unlock();
    report(done);
    done.clear();
    const bool has_come = waiter_.wait_any(flags.all(), WaitPolicy{}, watch, kTick);
    lock.lock();
    return has_come;
  } catch (const Error& error) {
    if (!lock.owns_lock()) lock.lock();
    fail(error, done);
  }
  lock.unlock();
  report(done);
  lock.lock();
  return false;
}

bool PointToPoint::has_unfinished_sends() {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(sends_, [](const auto& queue) { return !queue.empty(); });
}

void PointToPoint::finish(CallerThread thread) {
  while (true) {
    RequestRef last;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& queue : sends_) {
        if (!queue.empty()) last = queue.back();
      }
    }
    if (!last) return;
    wait(*last, thread);
  }
}

void PointToPoint::close() {
  if (fork_generation_ == fork_generation()) {
    {
      Living& living = per_process<Living>();
      const std::lock_guard lock(living.mutex);
      std::erase(living.groups, this);
    }
    Done done;
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
      end_all(Error(ErrorKind::kInternal,
                    "rota: this communicator was closed before the message "
                    "came; wait for a recv before you close"),
              done);
    }
    attendant_->notify_all();
    report(done);
  }
  attendant_queue_.close();
}

void PointToPoint::move(Done& done) {
  for (int i = 0; i < transport_.world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(transport_.rank(), transport_.world_size(), i);
    push(peer, done);
    pull(peer, done);
  }
}

void PointToPoint::push(int peer, Done& done) {
  std::deque<RequestRef>& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty() && links_.to_send(peer).is_there()) {
    const RequestRef request = queue.front();
    const Message& message = request->message_;
    std::byte* out = links_.outgoing(peer);
    uint64_t num_free = piece_bytes(message, transport_.geometry().link_slot_bytes);
    if (request->num_moved_ == 0) {
      const Header header{message.tag, static_cast<uint64_t>(message.dtype), message.num_elems};
      std::memcpy(out, &header, sizeof(header));
      out += sizeof(header);
      num_free -= sizeof(header);
    }
    const uint64_t num_bytes = std::min(num_free, message.num_bytes() - request->num_moved_);
    cpu::copy_bytes(out, request->data_ + request->num_moved_, num_bytes);
    links_.publish(peer);
    request->num_moved_ += num_bytes;
    if (request->num_moved_ < message.num_bytes()) {
      request->moved_at_ = now();
      continue;
    }
    queue.pop_front();
    end(request, done);
  }
}

void PointToPoint::pull(int peer, Done& done) {
  Arriving& arriving = arriving_[static_cast<size_t>(peer)];
  while (links_.to_read(peer).is_there()) {
    const std::byte* in = links_.incoming(peer);
    uint64_t header_bytes = 0;
    if (!arriving.is_begun) {
      arriving = begin(peer, in);
      header_bytes = sizeof(Header);
      in += header_bytes;
    }
    const uint64_t num_there = arriving.piece_bytes - header_bytes;
    const uint64_t num_bytes = std::min(num_there, arriving.num_bytes_left);
    if (arriving.data != nullptr) {
      arriving.copier.copy(arriving.data, in, num_bytes);
      arriving.data += num_bytes;
    }
    links_.release(peer);
    arriving.num_bytes_left -= num_bytes;
    const RequestRef& recv = arriving.early ? arriving.early->taken_by : arriving.recv;
    if (recv) recv->num_moved_ += num_bytes;
    if (arriving.num_bytes_left > 0) {
      if (recv) recv->moved_at_ = now();
      continue;
    }
    if (arriving.early) {
      arriving.early->is_whole = true;
      if (recv) deliver(*arriving.early, recv, done);
    } else {
      end(recv, done);
    }
    arriving = {};
  }
}

PointToPoint::Arriving PointToPoint::begin(int source, const std::byte* slot) {
  Header header;
  std::memcpy(&header, slot, sizeof(header));
  check_header(header, source);
  const Message message{header.tag, static_cast<DType>(header.dtype), header.num_elems};
  Arriving arriving{.is_begun = true,
                    .piece_bytes = piece_bytes(message, transport_.geometry().link_slot_bytes),
                    .num_bytes_left = message.num_bytes()};
  const auto recv = std::ranges::find_if(
      recvs_, [&](const RequestRef& request) { return matches(*request, source, message.tag); });
  if (recv != recvs_.end()) {
    arriving.recv = *recv;
    arriving.copier = {message.num_bytes(), transport_.world_size()};
    recvs_.erase(recv);
    if (agree(*arriving.recv, source, message)) arriving.data = arriving.recv->data_;
    return arriving;
  }
  arriving.early = std::make_shared<Early>(Early{source, message, memory_for(source, message)});
  arriving.data = arriving.early->data.get();
  early_.push_back(arriving.early);
  return arriving;
}

std::unique_ptr<std::byte[]> PointToPoint::memory_for(int source, const Message& message) const {
  try {
    return std::make_unique_for_overwrite<std::byte[]>(message.num_bytes());
  } catch (const std::bad_alloc&) {
    uint64_t kept_bytes = 0;
    for (const auto& early : early_) kept_bytes += early->message.num_bytes();
    throw Error(ErrorKind::kTransport,
                join("rota.recv: rank ", transport_.rank(), " has no memory for a message of rank ",
                     source, ' ', text_of(message),
                     " that came before its recv: ", message.num_bytes(), " bytes, and it keeps ",
                     kept_bytes, " of other such messages; call recv before the sender sends"));
  }
}

bool PointToPoint::take_early(const RequestRef& recv, Done& done) {
  const auto found = std::ranges::find_if(early_, [&](const auto& early) {
    return !early->taken_by && matches(*recv, early->source, early->message.tag);
  });
  if (found == early_.end()) return false;
  const std::shared_ptr<Early> early = *found;
  agree(*recv, early->source, early->message);
  early->taken_by = recv;
  if (early->is_whole) deliver(*early, recv, done);
  return true;
}

void PointToPoint::deliver(const Early& early, const RequestRef& recv, Done& done) {
  if (!recv->error_) cpu::copy_bytes(recv->data_, early.data.get(), early.message.num_bytes());
  end(recv, done);
  early_.remove_if([&](const auto& other) { return other.get() == &early; });
}

bool PointToPoint::matches(const Request& recv, int source, uint64_t tag) {
  return (recv.peer_ == source || recv.peer_ == kAnyRank) && recv.message_.tag == tag;
}

// A message that disagrees was still meant for this recv, so it is dropped.
bool PointToPoint::agree(Request& recv, int source, const Message& sent) const {
  recv.peer_ = source;
  if (sent == recv.message_) return true;
  recv.error_.emplace(
      ErrorKind::kMismatch,
      join("rota.recv: ranks disagree: rank ", source, " called send", text_of(sent), "; rank ",
           transport_.rank(), " called recv", text_of(recv.message_),
           "; nothing was written: make dtype and number of elements equal"));
  return false;
}

void PointToPoint::end(const RequestRef& request, Done& done) {
  --num_unfinished_;
  request->is_done_.store(true, std::memory_order_release);
  if (request->on_done_) done.push_back(request);
}

void PointToPoint::fail(const Error& error, Done& done) {
  communicator_.fail(error);
  end_all(error, done);
}

void PointToPoint::end_all(const Error& error, Done& done) {
  const auto give_up = [&](const RequestRef& request) {
    request->error_ = error;
    end(request, done);
  };
  for (auto& queue : sends_) {
    std::ranges::for_each(queue, give_up);
    queue.clear();
  }
  std::ranges::for_each(recvs_, give_up);
  recvs_.clear();
  for (const auto& early : early_) {
    if (early->taken_by) give_up(early->taken_by);
  }
  early_.clear();
  for (Arriving& arriving : arriving_) {
    if (arriving.recv) give_up(arriving.recv);
    // What still arrives is dropped.
    arriving.recv = nullptr;
    arriving.early = nullptr;
    arriving.data = nullptr;
  }
}

uint64_t PointToPoint::needed_peers() const {
  uint64_t peers = 0;
  for (const RequestRef& recv : recvs_) {
    if (recv->peer_ != kAnyRank) peers |= uint64_t{1} << recv->peer_;
  }
  for (size_t peer = 0; peer < sends_.size(); ++peer) {
    if (!sends_[peer].empty()) peers |= uint64_t{1} << peer;
  }
  return peers;
}

PointToPoint::AwaitedFlags PointToPoint::awaited() const {
  AwaitedFlags flags;
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    if (peer == transport_.rank()) continue;
    flags.add(links_.to_read(peer));
    if (!sends_[static_cast<size_t>(peer)].empty()) flags.add(links_.to_send(peer));
  }
  return flags;
}

void PointToPoint::report(const Done& done) {
  for (const RequestRef& request : done) {
    // Also destroys the callback, whose captures may keep the request alive.
    std::exchange(request->on_done_, nullptr)(*request);
  }
}

}  // namespace rota
