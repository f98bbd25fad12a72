#include "core/point_to_point.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <new>
#include <string_view>
#include <utility>

#include "base/per_process.h"
#include "core/communicator.h"

namespace rota {
namespace {

// How long a borrowed thread stays when nothing is outstanding: longer than the gap between two
// steps of a pipeline, because waking a thread costs more than sending a short message.
constexpr auto kLinger = std::chrono::milliseconds(100);

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

// Ends a wait for flags with an error when what is awaited makes no progress for the group's
// timeout or the group has failed.
class PointToPoint::Observer final : public WaitObserver {
 public:
  explicit Observer(Watch& watch) : watch_(watch) {}

  // moved_at: when the awaited request moved last. What moves it later ends a wait.
  void begin_wait(Nanoseconds moved_at) { moved_at_ = moved_at; }
  std::optional<Error> poll() override { return watch_.poll(); }
  std::vector<const LifeWord*> lives() const override { return watch_.lives(); }
  std::optional<Error> tick(Nanoseconds waited) override {
    const Nanoseconds time = steady_now();
    if (!start_) start_ = time - waited;
    // Not since this wait began, because waits also end when other messages arrive.
    return watch_.tick(time - std::max(*start_, moved_at_));
  }

 private:
  Watch& watch_;
  Nanoseconds moved_at_{};
  std::optional<Nanoseconds> start_;  // known from the first tick on: reading the clock takes time
};

PointToPoint::PointToPoint(Communicator& communicator, transport::Transport& transport,
                           const std::function<void()>* check_interrupt)
    : communicator_(communicator),
      transport_(transport),
      check_interrupt_(check_interrupt),
      waiter_(&transport.own_control().sleeping_on_links,
              transport.peers_flags(&transport::ControlBlock::sleeping_on_links),
              &communicator.core_sharing()),
      // Also among several hosts, where messages would take half as long again if ranks slept at
      // once.
      policy_(WaitPolicy::for_ranks(transport.world_size())),
      queues_(transport, waiter_) {
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

void PointToPoint::check_call(Direction direction, int peer) const {
  const std::string_view call = name(direction);
  communicator_.check_usable(call);
  const bool is_any = direction == Direction::kRecv && peer == kAnyRank;
  if (!is_any && (peer < 0 || peer >= transport_.world_size())) {
    throw Error(ErrorKind::kValue, join("rota.", call, ": the peer is ", peer,
                                        ", expected a rank in [0, ", transport_.world_size(), ")"));
  }
}

RequestRef PointToPoint::start(Direction direction, void* data, const Message& message, int peer,
                               OnDone on_done) {
  check_call(direction, peer);
  auto request = std::make_shared<Request>(direction, static_cast<std::byte*>(data), message, peer,
                                           std::move(on_done));
  Done done;
  {
    const Lock lock(mutex_);
    start(request, done);
  }
  report(done);
  return request;
}

// Whatever fails ends all requests: nobody may refer to this one once its caller knows.
void PointToPoint::start(const RequestRef& request, Done& done) {
  request->number_ = ++num_requests_;
  try {
    queues_.start(request, done);
  } catch (const Error& error) {
    fail(error, done);
  } catch (const std::bad_alloc&) {
    fail(Error(ErrorKind::kTransport,
               join("rota.", name(request->direction_), ": the process has no memory left")),
         done);
  }
}

int PointToPoint::run(Direction direction, void* data, const Message& message, int peer,
                      CallerThread thread) {
  check_call(direction, peer);
  Request request(direction, static_cast<std::byte*>(data), message, peer);
  const auto next_awaited = [&] { return request.is_done() ? nullptr : &request; };
  Done done;
  Lock lock(mutex_);
  start(RequestRef(RequestRef(), &request), done);
  if (!request.is_done()) wait_while(next_awaited, lock, thread, std::nullopt, done);
  lock.unlock();
  report(done);
  if (request.error()) throw *request.error();
  return request.peer();
}

template <typename Body>
void PointToPoint::move_without_waiting(const Body& body) {
  Done done;
  {
    const std::lock_guard lock(mutex_);
    try {
      body(done);
    } catch (const Error& error) {
      fail(error, done);
    }
  }
  report(done);
}

bool PointToPoint::test(const Request& request) {
  if (request.is_done()) return true;
  communicator_.check_process(name(request.direction_));
  move_without_waiting([&](Done& done) {
    queues_.move(done, &request);
    if (!request.is_done()) communicator_.check_usable(name(request.direction_));
  });
  return request.is_done();
}

std::optional<int> PointToPoint::probe(uint64_t tag) {
  communicator_.check_process(name(Direction::kRecv));
  std::optional<int> sender;
  move_without_waiting([&](Done& done) {
    queues_.move_all(done);
    sender = queues_.find_early(tag);
  });
  return sender;
}

bool PointToPoint::wait(const Request& request, CallerThread thread,
                        std::optional<Nanoseconds> patience) {
  if (!request.is_done()) {
    communicator_.check_process(name(request.direction_));
    const auto next_awaited = [&] { return request.is_done() ? nullptr : &request; };
    Done done;
    Lock lock(mutex_);
    wait_while(next_awaited, lock, thread, patience, done);
    lock.unlock();
    report(done);
    if (!request.is_done()) return false;
  }
  if (request.error()) throw *request.error();
  return true;
}

template <typename NextAwaited>
std::optional<Error> PointToPoint::wait_while(const NextAwaited& next_awaited, Lock& lock,
                                              CallerThread thread,
                                              std::optional<Nanoseconds> patience, Done& done) {
  std::optional<Error> failure;
  Watch watch(transport_, communicator_.timeout(), check_interrupt_);
  Observer observer(watch);
  const Nanoseconds start = patience ? steady_now() : Nanoseconds();
  bool is_patient = true;
  uint64_t number = 0;
  std::optional<TagText> phase;  // watch refers to it
  ++num_waits_;
  ++num_waiting_;
  try {
    while (true) {
      queues_.move(done, next_awaited());
      const Request* request = next_awaited();
      if (request == nullptr || !is_patient) {
        failure = queues_.end_error();
        break;
      }
      if (request->number_ != number) {
        number = request->number_;
        watch.begin_call(name(request->direction_), number,
                         /*lets_signals_through=*/thread == CallerThread::kUser);
      }
      watch.begin_wait(request->peer_, phase.emplace(request->message_.tag), request->num_moved_);
      observer.begin_wait(request->moved_at_);
      const MessageQueues::AwaitedFlags flags = awaited();
      lock.unlock();
      report(done);
      done.clear();
      const auto patience_left =
          patience ? std::optional(*patience - (steady_now() - start)) : std::nullopt;
      is_patient = waiter_.wait_any(flags.all(), policy_, observer, patience_left);
      lock.lock();
    }
  } catch (const Error& error) {
    if (!lock.owns_lock()) lock.lock();
    fail(error, done);
    failure = error;
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
  return failure;
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
        group->queues_.move_all(done);
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
  Nanoseconds used_at = steady_now();
  while (!is_closing_ && (queues_.num_unfinished() > 0 || steady_now() - used_at < kLinger)) {
    if (queues_.num_unfinished() > 0) used_at = steady_now();
    const uint64_t num_waits = num_waits_;
    attendant_->wait_for(lock, kTick, [this] { return is_closing_; });
    while (!is_closing_ && queues_.num_unfinished() > 0 && num_waiting_ == 0 &&
           num_waits == num_waits_) {
      if (!step_in(lock)) break;
    }
  }
  is_attended_ = false;
}

// Moves what can be moved, then waits for more for about a tick. Returns false if nothing came.
bool PointToPoint::step_in(Lock& lock) {
  Watch watch(transport_, communicator_.timeout(), check_interrupt_);
  watch.begin_call("send_recv", num_requests_, /*lets_signals_through=*/false);
  Done done;
  try {
    queues_.move_all(done);
    watch.begin_wait_for_all(queues_.needed_peers(), "attended", 0);
    const MessageQueues::AwaitedFlags flags = awaited();
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
  if (communicator_.is_of_parent()) return false;
  const std::lock_guard lock(mutex_);
  return queues_.last_send() != nullptr;
}

void PointToPoint::finish(CallerThread thread) {
  if (communicator_.is_of_parent()) return;
  const auto next_awaited = [this] { return queues_.last_send(); };
  Done done;
  Lock lock(mutex_);
  if (next_awaited() == nullptr) return;
  const auto failure = wait_while(next_awaited, lock, thread, std::nullopt, done);
  lock.unlock();
  report(done);
  if (failure) throw *failure;
}

void PointToPoint::close() {
  bool is_first = false;
  if (!communicator_.is_of_parent()) {
    {
      Living& living = per_process<Living>();
      const std::lock_guard lock(living.mutex);
      std::erase(living.groups, this);
    }
    Done done;
    {
      const std::lock_guard lock(mutex_);
      is_first = !std::exchange(is_closing_, true);
      end_all(Error(ErrorKind::kInternal,
                    "rota: this communicator was closed before the message "
                    "came; wait for a recv before you close"),
              done);
    }
    attendant_->notify_all();
    report(done);
  }
  attendant_queue_.close();
  // Not by the destructor, which may hold the GIL that callbacks need.
  if (is_first) callbacks_.close();
}

void PointToPoint::fail(const Error& error, Done& done) {
  communicator_.fail(error);
  end_all(error, done);
}

// A thread that waits for a request sleeps on what peers write, and the end of the request changes
// none of that: without a flag of its own it would wait for the peer, or for the timeout.
void PointToPoint::end_all(const Error& error, Done& done) {
  queues_.end_all(error, done);
  ended_.publish(1);
  Waiter::wake_all(ended_);
}

MessageQueues::AwaitedFlags PointToPoint::awaited() const {
  MessageQueues::AwaitedFlags flags = queues_.awaited();
  flags.add({&ended_, 1});
  return flags;
}

void PointToPoint::report(const Done& done) {
  for (const RequestRef& request : done) {
    // Also destroys the callback, whose captures may keep the request alive.
    std::exchange(request->on_done_, nullptr)(*request);
  }
}

}  // namespace rota
