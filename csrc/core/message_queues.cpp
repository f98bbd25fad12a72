#include "core/message_queues.h"

#include <algorithm>
#include <new>

#include "schedule/direct.h"

namespace rota {
namespace {

// What goes beside a message's chunks.
using Header = transport::Links::Header;
Header header_of(const Message& message) {
  return {message.tag, static_cast<uint64_t>(message.dtype), message.num_elems};
}

// A message is cut, so that the receiver copies a chunk while the sender copies the next one. The
// chunks of longer messages are longer, because flags take time, too, and a copy of 128 KiB takes
// less for each byte than one of 32 where the source comes from memory (benchmarks/LOG.md).
uint64_t chunk_bytes(const Message& message, const transport::Geometry& geometry) {
  const uint64_t num_bytes = message.num_bytes();
  const uint64_t longest = geometry.cell_bytes, shortest = longest / transport::kChunksPerCell;
  const uint64_t quarter = std::clamp(num_bytes / 4, shortest, longest / 4);
  const uint64_t chunk = std::max(quarter, std::min(num_bytes / 16, longest));
  return chunk / kCacheLineBytes * kCacheLineBytes;
}

Message message_of(const Header& header, int source) {
  // Checks the ranges, because the words come from another process.
  constexpr uint64_t kMaxElems = uint64_t{1} << 56;
  const auto [tag, dtype, num_elems] = header;
  const bool is_dtype = dtype < kNumDTypes || (dtype <= UINT16_MAX && is_moved_dtype(DType(dtype)));
  if (!is_dtype || num_elems >= kMaxElems) {
    throw Error(ErrorKind::kInternal,
                join("rota.recv: the header of a message from rank ", source,
                     " is damaged; does another program write to its memory?"));
  }
  return {tag, static_cast<DType>(dtype), num_elems};
}

std::string text_of(const Message& message) {
  return join("(", name(message.dtype), '[', message.num_elems, "], tag ", message.tag, ')');
}

}  // namespace

MessageQueues::MessageQueues(transport::Transport& transport, Waiter& waiter)
    : transport_(transport),
      links_(transport, waiter),
      sends_(static_cast<size_t>(transport.world_size())),
      arriving_(static_cast<size_t>(transport.world_size())) {}

void MessageQueues::start(const RequestRef& request, Done& done) {
  ++num_unfinished_;
  if (end_error_) {
    request->error_ = end_error_;
    return end(request, done);
  }
  const int own = transport_.rank();
  if (request->peer_ == kAnyRank && transport_.world_size() == 1) request->peer_ = own;
  const int peer = request->peer_;
  if (request->direction_ == Direction::kSend) {
    if (peer == own) return send_to_self(request, done);
    sends_[static_cast<size_t>(peer)].push_back(request);
    push(peer, done);
    if (request->is_done()) return;
  } else if (take_early(request, done)) {
    return;
  } else {
    recvs_.push_back(request);
  }
  if (peer == own) return;
  if (peer == kAnyRank) return move(done, nullptr);
  exchange(peer, [] { return false; }, done);
}

void MessageQueues::move(Done& done, const Request* awaited) {
  move_while([&] { return awaited != nullptr && !awaited->is_done(); }, done);
}

void MessageQueues::move_all(Done& done) {
  move_while([] { return true; }, done);
}

template <typename TakesUnasked>
void MessageQueues::move_while(const TakesUnasked& takes_unasked, Done& done) {
  for (int i = 0; i < transport_.world_size() - 1; ++i) {
    exchange(schedule::rotated_peer(transport_.rank(), transport_.world_size(), i), takes_unasked,
             done);
  }
}

template <typename TakesUnasked>
void MessageQueues::exchange(int peer, const TakesUnasked& takes_unasked, Done& done) {
  push(peer, done);
  pull(peer, takes_unasked, done);
  push(peer, done);  // what arrived may have brought room
}

bool MessageQueues::push_chunk(Request& send) {
  const std::optional<transport::Links::Room> room = links_.outgoing(send.peer_);
  if (!room) return false;
  const Message& message = send.message_;
  const uint64_t num_left = message.num_bytes() - send.num_moved_;
  const uint64_t num_bytes =
      std::min({chunk_bytes(message, transport_.geometry()), num_left, room->bytes.size()});
  const bool is_end = num_bytes == num_left;
  cpu::SlotWriter& writer = room->is_read ? answer_writer_ : writer_;
  writer.to(send.peer_).store(room->bytes.data(), send.data_ + send.num_moved_, num_bytes);
  links_.publish(send.peer_, header_of(message), num_bytes, is_end);
  send.num_moved_ += num_bytes;
  return true;
}

void MessageQueues::push(int peer, Done& done) {
  std::deque<RequestRef>& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty()) {
    const RequestRef request = queue.front();
    if (!push_chunk(*request)) return;
    if (request->num_moved_ < request->message_.num_bytes()) {
      request->moved_at_ = steady_now();
      continue;
    }
    queue.pop_front();
    end(request, done);
  }
}

// The message goes to the recv that waits for it, or is kept until one does.
void MessageQueues::send_to_self(const RequestRef& send, Done& done) {
  const Message& message = send->message_;
  try {
    Arriving arriving = begin(send->peer_, message, /*takes_unasked=*/true);
    take(arriving, send->data_, message.num_bytes());
    if (arriving.early) {
      arriving.early->is_whole = true;
    } else {
      end(arriving.recv, done);
    }
  } catch (const Error& error) {  // no memory, of which no other rank needs to know
    send->error_ = error;
  }
  end(send, done);
}

template <typename TakesUnasked>
void MessageQueues::pull(int peer, const TakesUnasked& takes_unasked, Done& done) {
  Arriving& arriving = arriving_[static_cast<size_t>(peer)];
  while (const auto chunk = links_.incoming(peer)) {
    if (!arriving.message) {
      arriving = begin(peer, message_of(chunk->header, peer), takes_unasked());
      if (!arriving.message) return;
    }
    const uint64_t num_bytes = std::min(chunk->bytes.size(), arriving.num_bytes_left);
    take(arriving, chunk->bytes.data(), num_bytes);
    links_.release(peer);
    const RequestRef& recv = arriving.early ? arriving.early->taken_by : arriving.recv;
    if (recv) recv->num_moved_ += num_bytes;
    if (arriving.num_bytes_left > 0) {
      if (recv) recv->moved_at_ = steady_now();
      continue;
    }
    if (arriving.early) {
      arriving.early->is_whole = true;
      if (recv) deliver(*arriving.early, recv, done);
    } else if (recv) {  // otherwise it has failed already
      end(recv, done);
    }
    arriving = {};
  }
}

void MessageQueues::take(Arriving& arriving, const std::byte* in, uint64_t num_bytes) {
  arriving.num_bytes_left -= num_bytes;
  if (arriving.data == nullptr) return;
  arriving.copier.copy(arriving.data, in, num_bytes);
  arriving.data += num_bytes;
}

MessageQueues::Arriving MessageQueues::begin(int source, const Message& message,
                                             bool takes_unasked) {
  Arriving arriving{.message = message, .num_bytes_left = message.num_bytes()};
  const auto recv = std::ranges::find_if(
      recvs_, [&](const RequestRef& request) { return matches(*request, source, message.tag); });
  if (recv != recvs_.end()) {
    arriving.recv = *recv;
    arriving.copier = cpu::OutputCopier::for_message(message.num_bytes());
    if (recv == recvs_.begin()) {  // mostly; erase() takes longer
      recvs_.pop_front();
    } else {
      recvs_.erase(recv);
    }
    if (agree(*arriving.recv, source, message)) arriving.data = arriving.recv->data_;
    return arriving;
  }
  if (!takes_unasked) return {};
  arriving.early = std::make_shared<Early>(Early{source, message, memory_for(source, message)});
  arriving.data = arriving.early->data.get();
  early_.push_back(arriving.early);
  return arriving;
}

std::unique_ptr<std::byte[]> MessageQueues::memory_for(int source, const Message& message) const {
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

bool MessageQueues::take_early(const RequestRef& recv, Done& done) {
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

std::optional<int> MessageQueues::find_early(uint64_t tag) const {
  for (const auto& early : early_) {
    if (!early->taken_by && early->message.tag == tag) return early->source;
  }
  return std::nullopt;
}

void MessageQueues::deliver(const Early& early, const RequestRef& recv, Done& done) {
  if (!recv->error_) cpu::copy_bytes(recv->data_, early.data.get(), early.message.num_bytes());
  end(recv, done);
  early_.remove_if([&](const auto& other) { return other.get() == &early; });
}

bool MessageQueues::matches(const Request& recv, int source, uint64_t tag) {
  return (recv.peer_ == source || recv.peer_ == kAnyRank) && recv.message_.tag == tag;
}

// A message that disagrees was still meant for this recv, so it is dropped.
bool MessageQueues::agree(Request& recv, int source, const Message& sent) const {
  recv.peer_ = source;
  if (sent == recv.message_) return true;
  recv.error_.emplace(
      ErrorKind::kMismatch,
      join("rota.recv: ranks disagree: rank ", transport_.number_of(source), " called send",
           text_of(sent), "; rank ", transport_.number_of(transport_.rank()), " called recv",
           text_of(recv.message_),
           "; nothing was written: make dtype and number of elements equal"));
  return false;
}

void MessageQueues::end(const RequestRef& request, Done& done) {
  --num_unfinished_;
  request->is_done_.store(true, std::memory_order_release);
  if (request->on_done_) done.push_back(request);
}

void MessageQueues::end_all(const Error& error, Done& done) {
  if (!end_error_) end_error_ = error;
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

uint64_t MessageQueues::needed_peers() const {
  uint64_t peers = 0;
  for (const RequestRef& recv : recvs_) {
    if (recv->peer_ != kAnyRank) peers |= uint64_t{1} << recv->peer_;
  }
  for (size_t peer = 0; peer < sends_.size(); ++peer) {
    if (!sends_[peer].empty()) peers |= uint64_t{1} << peer;
  }
  return peers;
}

MessageQueues::AwaitedFlags MessageQueues::awaited() const {
  AwaitedFlags flags;
  for (int peer = 0; peer < transport_.world_size(); ++peer) {
    if (peer != transport_.rank()) flags.add(links_.to_read(peer));
  }
  return flags;
}

const Request* MessageQueues::last_send() const {
  const Request* last = nullptr;
  for (const auto& queue : sends_) {
    if (!queue.empty()) last = queue.back().get();
  }
  return last;
}

}  // namespace rota
