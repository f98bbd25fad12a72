#include "core/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "base/per_process.h"
#include "cpu/executor.h"
#include "schedule/direct.h"
#include "transport/heap.h"

namespace rota {
namespace {

std::vector<int> ranks_below(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// A rank's post of this epoch.
const Flag& post_of(const transport::Transport& transport, int rank, uint64_t epoch) {
  return transport.region(rank).control().post[epoch % 2];
}

}  // namespace

Communicator::Communicator(std::unique_ptr<transport::Transport> transport, Nanoseconds timeout,
                           std::function<void()> check_interrupt)
    : transport_(std::move(transport)),
      core_sharing_(transport_->own_core(), transport_->other_cores()),
      waiter_(&transport_->own_control().sleeping,
              transport_->peers_flags(&transport::ControlBlock::sleeping), &core_sharing_),
      check_interrupt_(std::move(check_interrupt)),
      watch_(*transport_, timeout, &check_interrupt_),
      // Ranks of several hosts leave the cores to the threads that move their messages.
      wait_policy_(transport_->is_among_hosts() ? WaitPolicy{}
                                                : WaitPolicy::for_ranks(transport_->world_size())),
      everyone_(ranks_below(transport_->world_size())),
      fork_generation_(fork_generation()),
      point_to_point_(*this, *transport_, &check_interrupt_) {}

Communicator::~Communicator() {
  point_to_point_.close();
  // A forked child shares its parent's memory, but must not report the parent's departure.
  if (is_of_parent()) return;
  waiter_.publish(transport_->own_control().departed, 1);
}

void Communicator::abort(const std::string& reason) {
  if (is_of_parent()) return;  // not the parent's group
  publish_abort(ErrorKind::kInternal, ErrorKind::kPeerFailed, reason);
}

// No collective needs an acknowledgement at its end: a rank posts epoch e after it has completed
// epoch e - 1. Once all ranks have posted e, nobody reads anything of an earlier epoch any more:
// all slots are free, and so are the mailbox and the post of the other parity, which epoch e + 1
// will write.
template <typename Body>
void Communicator::in_epoch(const Call& call, CallerThread thread,
                            std::optional<Nanoseconds> own_timeout, const Body& body) {
  const std::lock_guard lock(mutex_);
  check_usable(call.kind_name());
  ++epoch_;
  watch_.begin_collective(call.kind_name(), epoch_,
                          /*lets_signals_through=*/thread == CallerThread::kUser, own_timeout);
  try {
    // A late rank must see a failure even if every post that it needs is already there.
    if (const auto error = watch_.poll()) throw *error;
    body();
  } catch (const Error& error) {
    // All ranks compared the same calls and stopped at the same point: the group stays usable.
    if (error.kind() == ErrorKind::kMismatch) {
      transport_->own_control().completed.record(epoch_);
    } else {
      fail(error);
    }
    throw;
  } catch (...) {
    publish_abort(ErrorKind::kInternal, ErrorKind::kPeerFailed,
                  join(watch_.prefix(), " was interrupted ", watch_.place()));
    throw;
  }
  transport_->own_control().completed.record(epoch_);
}

void Communicator::agree(const Call& call, CallerThread thread,
                         std::optional<Nanoseconds> own_timeout) {
  in_epoch(call, thread, own_timeout, [&] { rendezvous(call); });
}

void Communicator::run(const Call& call, const cpu::Buffers& buffers, CallerThread thread,
                       std::optional<Nanoseconds> own_timeout) {
  in_epoch(call, thread, own_timeout, [&] {
    cpu::Exchange exchange(*transport_, waiter_, wait_policy_, watch_, slot_writer_, num_rounds_);
    const cpu::Executor& executor = cpu::executor_of(call);
    const size_t max_bytes = transport_->geometry().message_bytes;
    const std::optional<uint64_t> num_bytes =
        executor.message_bytes(call, buffers, world_size(), max_bytes);
    if (num_bytes != 0) transport_->reserve_slots(transport::kNumSlots);
    if (num_bytes && *num_bytes <= max_bytes) {
      const cpu::Mailboxes mailboxes(*transport_, slot_writer_, epoch_, *num_bytes,
                                     mailboxes_are_reserved_);
      executor.contribute(call, buffers, mailboxes);
      rendezvous(call);
      mailboxes_are_reserved_ |= num_bytes != 0;
      num_rounds_ += executor.complete(call, buffers, mailboxes, exchange);
    } else {
      const cpu::Source source = executor.source_of(call, buffers, rank(), world_size());
      post_source(source);
      rendezvous(call);
      const auto bytes_of = [&](int peer) {
        return executor.source_bytes(call, buffers, peer, world_size());
      };
      if (const auto sources = find_sources(source, bytes_of)) {
        num_rounds_ += executor.run_in_place(call, buffers, *sources, exchange);
        // A peer that gives up no longer waits until this rank has read its tensor, and may
        // overwrite it. The peer publishes its abort before that; this rank publishes that it has
        // read before it looks for aborts. All three accesses are sequentially consistent, which
        // guarantees this order.
        if (const auto error = watch_.poll()) throw *error;
      } else {
        num_rounds_ += executor.run_rounds(call, buffers, exchange);
      }
    }
  });
}

void Communicator::check_process(std::string_view call) const {
  if (!is_of_parent()) return;
  throw Error(ErrorKind::kInternal, join("rota.", call,
                                         ": this communicator belongs to the parent process; make "
                                         "a new one after fork"));
}

void Communicator::check_usable(std::string_view collective) const {
  check_process(collective);
  if (is_dead_.load(std::memory_order_acquire)) {
    throw Error(dead_kind_, join("rota.", collective, ": the group is dead: ", dead_reason_,
                                 "; destroy it and make a new one"));
  }
}

std::optional<ErrorKind> Communicator::failure() const {
  if (!is_dead_.load(std::memory_order_acquire)) return std::nullopt;
  return dead_kind_;
}

std::map<int, std::string> Communicator::ended_ranks() const {
  std::map<int, std::string> ended;
  for (const int peer : transport_->find_dead_peers()) {
    ended.emplace(transport_->number_of(peer), join(transport_->describe(peer), " has died"));
  }
  return ended;
}

// A timeout names all ranks that have not come.
void Communicator::wait_for_post(int peer) {
  watch_.begin_wait(peer, "start", 0);
  try {
    waiter_.wait(post_of(*transport_, peer, epoch_), epoch_, wait_policy_, watch_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    std::string others;
    for (const int rank : everyone_) {
      if (rank == peer || post_of(*transport_, rank, epoch_).load() >= epoch_) continue;
      others +=
          join(others.empty() ? "; also awaited: " : ", ", "rank ", transport_->number_of(rank));
    }
    throw Error(error.kind(), error.what() + others);
  }
}

// Posts the call, waits until every rank has posted one, and compares.
void Communicator::rendezvous(const Call& call) {
  Flag& post = transport_->own_control().post[parity()];
  const Call::Words words = call.to_words();
  post.payload = words;
  waiter_.publish(post, epoch_);

  bool all_agree = true;
  for (int i = 0; i < world_size() - 1; ++i) {
    const int peer = schedule::rotated_peer(rank(), world_size(), i);
    const Flag& peer_post = post_of(*transport_, peer, epoch_);
    if (peer_post.load() < epoch_) wait_for_post(peer);
    all_agree &= peer_post.payload == words;
  }
  if (!all_agree) {
    throw mismatch(call, epoch_, everyone_,
                   [this](int rank) -> const Flag& { return post_of(*transport_, rank, epoch_); });
  }
}

// Values of ControlBlock::source: 0, peers cannot read the tensor in place; 1, peers read
// nothing from this rank; otherwise, the tensor's offset in the rank's heap, plus 2.
constexpr uint64_t kNothingToRead = 1;

void Communicator::post_source(const cpu::Source& source) {
  uint64_t& word = transport_->own_control().source[parity()];
  word = 0;
  if (source.kind == cpu::Source::Kind::kSlots) return;
  uint64_t place = kNothingToRead;
  if (source.kind == cpu::Source::Kind::kTensor) {
    const auto offset = per_process<transport::Heap>().offset_of(source.tensor);
    if (!offset) return;  // most tensors: nothing else is looked at
    place = *offset + kNothingToRead + 1;
  }
  for (const int peer : everyone_) {
    if (peer != rank() && transport_->heap_of(peer).empty()) return;
  }
  word = place;
}

template <typename BytesOf>
std::optional<cpu::Sources> Communicator::find_sources(const cpu::Source& own,
                                                       BytesOf bytes_of) const {
  if (own.kind == cpu::Source::Kind::kSlots) return std::nullopt;
  const auto word_of = [this](int rank) {
    return transport_->region(rank).control().source[parity()];
  };
  if (std::ranges::any_of(everyone_, [&](int rank) { return word_of(rank) == 0; })) {
    return std::nullopt;
  }
  cpu::Sources sources{};
  for (const int peer : everyone_) {
    const uint64_t word = word_of(peer);
    if (word == kNothingToRead || peer == rank()) continue;
    const std::span<const std::byte> heap = transport_->heap_of(peer);
    const uint64_t offset = word - kNothingToRead - 1;
    if (offset > heap.size() || bytes_of(peer) > heap.size() - offset) {
      throw Error(ErrorKind::kTransport,
                  join(watch_.prefix(), ": ", transport_->describe(peer),
                       " says that its tensor lies outside its heap; its memory is damaged"));
    }
    sources[static_cast<size_t>(peer)] = const_cast<std::byte*>(heap.data()) + offset;
  }
  return sources;
}

uint64_t Communicator::post_launch(const Call& call) {
  return post_launch(call, everyone_, [this](int rank) -> auto& {
    return transport_->region(rank).control().launches;
  });
}

uint64_t Communicator::post_transfer(const Call& call, int sender, int receiver) {
  return post_launch(call, std::array{sender, receiver}, [&](int rank) -> auto& {
    const transport::ControlBlock& control = transport_->region(rank).control();
    return rank == sender ? control.sends[receiver] : control.receives[sender];
  });
}

// Each rank posts its launch and then reads the others' posts of the same launch. Both accesses are
// sequentially consistent, so of two ranks at least the later one sees the other's post. A post is
// overwritten once every rank has posted its next launch, and so has compared this one.
template <typename PostsOf>
uint64_t Communicator::post_launch(const Call& call, std::span<const int> ranks,
                                   const PostsOf& posts_of) {
  const std::lock_guard lock(mutex_);
  check_usable(call.kind_name());
  using Posts = std::remove_cvref_t<decltype(posts_of(0))>;
  auto& own = const_cast<Posts&>(posts_of(rank()));  // this rank is its only writer
  const uint64_t launch = own.launched.load() + 1;
  try {
    watch_.begin_call(call.kind_name(), launch, /*lets_signals_through=*/true);
    for (const int peer : ranks) {
      if (launch <= Posts::kNumPosts) break;
      watch_.begin_wait(peer, "queueing on the GPU", launch);
      waiter_.wait(posts_of(peer).launched, launch - Posts::kNumPosts + 1, wait_policy_, watch_);
    }
    const Call::Words words = call.to_words();
    own.post(launch).payload = words;
    waiter_.publish(own.post(launch), launch);
    waiter_.publish(own.launched, launch);
    const auto post_of = [&](int rank) -> const Flag& { return posts_of(rank).post(launch); };
    for (const int peer : ranks) {
      if (post_of(peer).load_ordered() == launch && post_of(peer).payload != words) {
        throw mismatch(call, launch, ranks, post_of);
      }
    }
    return Call::fingerprint(words);
  } catch (const Error& error) {
    fail(error);
    throw;
  } catch (...) {
    publish_abort(ErrorKind::kInternal, ErrorKind::kPeerFailed,
                  join(watch_.prefix(), " was interrupted ", watch_.place()));
    throw;
  }
}

uint64_t Communicator::num_posted_launches() const {
  return transport_->own().control().launches.launched.load();
}

// Names the ranks behind each call: "ranks 0, 2 called A; rank 1 called B".
template <typename PostOf>
Error Communicator::mismatch(const Call& own, uint64_t epoch, std::span<const int> ranks,
                             const PostOf& post_of) const {
  std::vector<std::pair<std::string, std::vector<int>>> calls;
  for (const int peer : ranks) {
    const Flag& post = post_of(peer);
    if (post.load() != epoch) continue;  // in post_launch(): not posted yet
    const std::string text = Call::from_words(post.payload).to_string();
    auto call = std::find_if(calls.begin(), calls.end(),
                             [&](const auto& entry) { return entry.first == text; });
    if (call == calls.end()) call = calls.insert(call, {text, {}});
    call->second.push_back(peer);
  }
  std::string all_calls;
  for (const auto& [text, ranks] : calls) {
    all_calls += join(all_calls.empty() ? "" : "; ", ranks.size() > 1 ? "ranks " : "rank ");
    for (size_t i = 0; i < ranks.size(); ++i)
      all_calls += join(i > 0 ? ", " : "", transport_->number_of(ranks[i]));
    all_calls += " called " + text;
  }
  return Error(ErrorKind::kMismatch,
               join("rota.", own.kind_name(), ": ranks disagree (epoch ", epoch, "): ", all_calls,
                    "; nothing was written: make all ranks call the same collective"));
}

void Communicator::fail(const Error& cause) {
  if (is_of_parent()) return;
  publish_abort(cause.kind(), cause.kind(), cause.told(), cause.has_cause());
}

void Communicator::publish_abort(ErrorKind kind_here, ErrorKind kind, const std::string& text,
                                 bool has_cause) {
  const std::lock_guard lock(abort_mutex_);
  if (is_dead_.load(std::memory_order_relaxed)) return;  // keep the first reason
  dead_reason_ = text;
  dead_kind_ = kind_here;
  is_dead_.store(true, std::memory_order_release);
  transport::ControlBlock& control = transport_->own_control();
  const size_t length = std::min(text.size(), sizeof(control.abort_text) - 1);
  std::memcpy(control.abort_text, text.data(), length);
  control.abort_text[length] = '\0';
  control.abort.payload[0] = static_cast<uint64_t>(kind);
  control.abort.payload[1] = has_cause;
  waiter_.publish(control.abort, 1);
}

}  // namespace rota
