#include "tensor/request_work.h"

#include "base/timeout.h"
#include "core/call_scope.h"
#include "tensor/errors.h"

namespace rota::tensors {

PackedMessage::PackedMessage(Direction direction, const at::Tensor& tensor)
    : direction_(direction),
      tensor_(tensor),
      packed_(tensor, direction == Direction::kSend ? Packed::Content::kRead
                                                    : Packed::Content::kOverwritten),
      memory_(tensor.storage()) {}

Message PackedMessage::message(uint64_t tag) const {
  return {.tag = tag,
          .dtype = movable_dtype(tensor_, name(direction_)),
          .num_elems = num_elems(tensor_)};
}

void PackedMessage::run(Communicator& communicator, int peer, uint64_t tag,
                        CallerThread thread) const {
  communicator.point_to_point().run(direction_, packed_.data(), message(tag), peer, thread);
  unpack();
}

RequestRef PackedMessage::start(Communicator& communicator, int peer, uint64_t tag,
                                PointToPoint::OnDone on_done) const {
  PointToPoint& links = communicator.point_to_point();
  return direction_ == Direction::kSend
             ? links.send(packed_.data(), message(tag), peer, std::move(on_done))
             : links.recv(packed_.data(), message(tag), peer, std::move(on_done));
}

void PackedMessage::unpack() const {
  if (direction_ == Direction::kRecv) packed_.unpack();
}

RequestWork::RequestWork(Direction direction, std::shared_ptr<Communicator> communicator,
                         const at::Tensor& tensor, std::function<void()> check_interrupt)
    : HostWork(communicator->rank(), op_type_of(direction), title_of(direction), {tensor},
               std::move(check_interrupt)),
      direction_(direction),
      communicator_(std::move(communicator)),
      message_(direction, tensors()[0]) {}

c10::intrusive_ptr<RequestWork> RequestWork::start(Direction direction,
                                                   std::shared_ptr<Communicator> communicator,
                                                   const at::Tensor& tensor, int peer, uint64_t tag,
                                                   std::function<void()> check_interrupt) {
  auto work = c10::make_intrusive<RequestWork>(direction, std::move(communicator), tensor,
                                               std::move(check_interrupt));
  // The callback keeps the work, and with it the tensor, alive until the request is done.
  const auto on_done = [work](const Request& request) { work->complete_request(request); };
  work->request_ = work->message_.start(*work->communicator_, peer, tag, on_done);
  return work;
}

void RequestWork::attend() { communicator_->point_to_point().attend(*request_, communicator_); }

void RequestWork::complete_request(const Request& request) {
  std::exception_ptr exception;
  try {
    if (request.error()) throw PythonError(*request.error());
    message_.unpack();
  } catch (...) {
    exception = std::current_exception();
  }
  complete(exception, &communicator_->point_to_point().callbacks());
}

bool RequestWork::wait(std::chrono::milliseconds timeout) {
  return with_python_errors([&] {
    const CallScope scope(communicator_.get(), "Work.wait", CallScope::Kind::kWait);
    const auto patience =
        timeout == kNoTimeout ? std::nullopt : std::optional<Nanoseconds>(usable_timeout(timeout));
    if (!communicator_->point_to_point().wait(*request_, CallerThread::kUser, patience)) {
      throw Error(ErrorKind::kTimeout, join("rota: Work.wait() gave up after ", timeout.count(),
                                            " ms; the ", name(direction_), " goes on"));
    }
    // The request is done, but the thread that completed it may still be unpacking.
    await_end();
    return true;
  });
}

bool RequestWork::isCompleted() {
  with_python_errors([&] { communicator_->point_to_point().test(*request_); });
  return HostWork::isCompleted();
}

}  // namespace rota::tensors
