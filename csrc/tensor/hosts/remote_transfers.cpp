#include "tensor/hosts/remote_transfers.h"

#include "tensor/errors.h"
#include "tensor/hosts/tags.h"
#include "tensor/request_work.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

struct Envelope {
  uint64_t dtype;
  uint64_t num_elems;
  int64_t data_tag;
  uint64_t unused = 0;

  size_t num_bytes() const { return num_elems * info(static_cast<DType>(dtype)).num_bytes; }
  std::string to_string() const {
    return join(name(static_cast<DType>(dtype)), '[', num_elems, ']');
  }
  bool fits(const Envelope& other) const {
    return dtype == other.dtype && num_elems == other.num_elems;
  }
};

}  // namespace

struct RemoteTransfers::Request {
  Request(Direction direction, const at::Tensor& tensor, int peer, int64_t tag)
      : tensor(tensor),
        packed(this->tensor, direction == Direction::kSend ? Packed::Content::kRead
                                                           : Packed::Content::kOverwritten),
        peer(peer),
        tag(tag),
        own{static_cast<uint64_t>(movable_dtype(tensor, name(direction))),
            tensors::num_elems(tensor), 0} {}

  at::Tensor tensor;
  Packed packed;
  int peer;
  int64_t tag;
  Envelope own;
  Envelope theirs{};
  Engine::Transfer envelope, data;
};

void RemoteTransfers::check(Direction direction, const at::Tensor& tensor, int peer,
                            int64_t tag) const {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::kValue, join("rota.", name(direction), ": ", what));
  };
  check_tensor(tensor, name(direction));
  if (peer == kAnyRank) {
    refuse("from any rank, but the ranks are on several hosts; name the source");
  }
  if (peer < 0 || peer >= bridge_.world_size() || peer == bridge_.rank()) {
    refuse(join("the peer is ", peer, ", expected another rank in [0, ", bridge_.world_size(),
                "); this is rank ", bridge_.rank()));
  }
  if (tag < 0 || tag >= kFirstDataTag) {
    refuse(join("tag is ", tag, ", expected one in [0, ", kFirstDataTag,
                ") between ranks of different hosts"));
  }
}

WorkRef RemoteTransfers::start(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                               Launch mode) {
  const bool is_send = direction == Direction::kSend;
  bridge_.check_usable(name(direction));
  check(direction, tensor, peer, tag);
  const auto request = std::make_shared<Request>(direction, tensor, peer, tag);
  // Started here, since messages match in the order of these calls.
  if (is_send) {
    request->own.data_tag = kFirstDataTag + num_sends_++ % kNumDataTags;
    request->envelope = bridge_.send(&request->own, sizeof(Envelope), peer, static_cast<int>(tag));
    request->data = bridge_.send(request->packed.data(), request->own.num_bytes(), peer,
                                 static_cast<int>(request->own.data_tag));
  } else {
    request->envelope =
        bridge_.recv(&request->theirs, sizeof(Envelope), peer, static_cast<int>(tag));
  }
  const auto work = c10::make_intrusive<HostWork>(
      bridge_.rank(), is_send ? ::c10d::OpType::SEND : ::c10d::OpType::RECV,
      is_send ? "rota:send" : "rota:recv", std::vector<at::Tensor>{tensor}, check_interrupt_);
  ++num_unfinished_;
  const auto job = [this, request, work, is_send] {
    std::exception_ptr exception;
    try {
      with_python_errors([&] { is_send ? send(*request) : recv(*request); });
    } catch (...) {
      exception = std::current_exception();
    }
    --num_unfinished_;
    work->complete(exception);
  };
  {
    const std::lock_guard lock(mutex_);
    threads_.remove_if([](const ProgressQueue& thread) { return thread.is_idle(); });
    sends_.remove_if([](const WorkRef& send) { return send->isCompleted(); });
    threads_.emplace_back().enqueue(job);
    if (is_send) sends_.push_back(work);
  }
  if (mode == Launch::kAsync) return work;
  work->wait(kNoTimeout);
  return {};
}

void RemoteTransfers::send(Request& request) {
  bridge_.wait_outside(request.envelope, "send");
  bridge_.wait_outside(request.data, "send");
}

void RemoteTransfers::recv(Request& request) {
  bridge_.wait_outside(request.envelope, "recv");
  const Envelope& theirs = request.theirs;
  const int data_tag = static_cast<int>(theirs.data_tag);
  if (theirs.fits(request.own)) {
    request.data =
        bridge_.recv(request.packed.data(), theirs.num_bytes(), request.peer, data_tag);
    bridge_.wait_outside(request.data, "recv");
    return request.packed.unpack();
  }
  // Taken in, so that the sender and the messages behind it go on.
  std::vector<std::byte> dropped(theirs.num_bytes());
  request.data = bridge_.recv(dropped.data(), dropped.size(), request.peer, data_tag);
  bridge_.wait_outside(request.data, "recv");
  throw Error(ErrorKind::kMismatch,
              join("rota.recv: rank ", bridge_.rank(), " expects ", request.own.to_string(),
                   " from rank ", request.peer, " (tag ", request.tag, "), which has sent ",
                   theirs.to_string(), "; make both the same"));
}

void RemoteTransfers::finish_sends(const std::function<void()>&) {
  std::list<WorkRef> sends;
  {
    const std::lock_guard lock(mutex_);
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
    const std::lock_guard lock(mutex_);
    threads.swap(threads_);
  }
}

}  // namespace rota::tensors
