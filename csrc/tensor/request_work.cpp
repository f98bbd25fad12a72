#include "tensor/request_work.h"

#include "tensor/errors.h"

namespace rota::tensors {
namespace {

Packed::Content content(Direction direction) {
  return direction == Direction::kSend ? Packed::Content::kRead : Packed::Content::kOverwritten;
}

}  // namespace

RequestWork::RequestWork(Direction direction, std::shared_ptr<Communicator> communicator,
                         const at::Tensor& tensor, std::function<void()> check_interrupt)
    : HostWork(communicator->rank(),
               direction == Direction::kSend ? ::c10d::OpType::SEND : ::c10d::OpType::RECV,
               direction == Direction::kSend ? "rota:send" : "rota:recv", {tensor},
               std::move(check_interrupt)),
      direction_(direction),
      communicator_(std::move(communicator)),
      packed_(tensors()[0], content(direction)) {}

c10::intrusive_ptr<RequestWork> RequestWork::start(Direction direction,
                                                   std::shared_ptr<Communicator> communicator,
                                                   const at::Tensor& tensor, int peer, uint64_t tag,
                                                   std::function<void()> check_interrupt,
                                                   Launch mode) {
  auto work = c10::make_intrusive<RequestWork>(direction, std::move(communicator), tensor,
                                               std::move(check_interrupt));
  const Message message{
      .tag = tag, .dtype = movable_dtype(tensor, name(direction)), .num_elems = num_elems(tensor)};
  PointToPoint& links = work->communicator_->point_to_point();
  // The callback keeps the work, and with it the tensor, alive until the request is done.
  const auto on_done = [work](const Request& request) { work->complete_request(request); };
  void* data = work->packed_.data();
  work->request_ = direction == Direction::kSend ? links.send(data, message, peer, on_done)
                                                 : links.recv(data, message, peer, on_done);
  if (mode == Launch::kBlocking) {
    work->wait(kNoTimeout);
  } else {
    links.attend(*work->request_, work->communicator_);
  }
  return work;
}

void RequestWork::complete_request(const Request& request) {
  std::exception_ptr exception;
  try {
    if (request.error()) throw PythonError(*request.error());
    if (direction_ == Direction::kRecv) packed_.unpack();
  } catch (...) {
    exception = std::current_exception();
  }
  complete(exception);
}

bool RequestWork::wait(std::chrono::milliseconds timeout) {
  return with_python_errors([&] {
    const auto patience =
        timeout == kNoTimeout ? std::nullopt : std::optional<Nanoseconds>(timeout);
    if (!communicator_->point_to_point().wait(*request_, CallerThread::kUser, patience)) {
      throw Error(ErrorKind::kTimeout, join("rota: Work.wait() gave up after ", timeout.count(),
                                            " ms; the ", name(direction_), " goes on"));
    }
    // The request is done, but the thread that completed it may still be unpacking.
    return HostWork::wait(kNoTimeout);
  });
}

bool RequestWork::isCompleted() {
  communicator_->point_to_point().test(*request_);
  return HostWork::isCompleted();
}

}  // namespace rota::tensors
