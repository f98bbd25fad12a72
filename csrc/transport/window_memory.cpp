#include "transport/window_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/fork_generation.h"
#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {
namespace {

// What an address says besides the listener: where the parts lie in the owner's heap.
struct Places {
  size_t control;
  uint64_t num_words;
  Span data;
  bool is_writable;
};

// A part of the heap, in the whole pages around it.
Mapping map_part(const UniqueFd& heap, const Span& part, WindowAccess access) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = part.offset / page_bytes * page_bytes;
  const size_t num_bytes = part.offset + part.num_bytes - begin;
  return Mapping(
      heap, std::max(num_bytes, page_bytes),
      access == WindowAccess::kWrite ? Mapping::Access::kWriter : Mapping::Access::kReader, begin);
}

std::byte* in_mapping(const Mapping& mapping, size_t offset) {
  return mapping.base() + offset % static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Frees a closed window's places in the heap.
void free_places(void* control, const void* data) {
  auto& heap = per_process<Heap>();
  heap.drop(data);
  heap.release(control);
}

// The same once all who have opened it have hung up, in a thread of its own. If there can be none,
// all stays in use as long as this process runs.
void free_places_when_unused(void* control, const void* data, std::shared_ptr<void> kept,
                             std::vector<UniqueFd> openers) {
  try {
    std::thread([=, kept = kept, openers = std::move(openers)] {
      for (const UniqueFd& opener : openers) wait_until_hung_up(opener);
      free_places(control, data);
    }).detach();
  } catch (const std::system_error&) {
    new std::shared_ptr<void>(std::move(kept));
  }
}

}  // namespace

WindowMemory::WindowMemory(std::span<std::byte> data, uint64_t num_words, WindowAccess access)
    : data_(data),
      num_words_(num_words),
      access_(access),
      fork_generation_(fork_generation()),
      token_(random_number()) {
  auto& heap = per_process<Heap>();
  if (!heap.offset_of(data_.data())) fail_transport("a window's memory is outside the heap");
  listener_ = Listener::open();
  control_ = new (heap.allocate(WindowControl::num_bytes(num_words))) WindowControl;
  heap.hold(data_.data());
  listener_->add(token_, *this);
}

void WindowMemory::close() {
  listener_->remove(token_);
  if (fork_generation_ == fork_generation()) control_->closed.publish(1);
}

WindowMemory::~WindowMemory() {
  close();
  if (fork_generation_ != fork_generation()) return;
  std::erase_if(openers_, has_hung_up);
  if (openers_.empty()) {
    free_places(control_, data_.data());
  } else {
    free_places_when_unused(control_, data_.data(), std::move(kept_), std::move(openers_));
  }
}

std::string WindowMemory::address() const {
  auto& heap = per_process<Heap>();
  return join(listener_->address_of(token_).to_string(), ' ', *heap.offset_of(control_), ' ',
              num_words_, ' ', *heap.offset_of(data_.data()), ' ', data_.size(), ' ',
              access_ == WindowAccess::kWrite);
}

void WindowMemory::answer(UniqueFd& connection, ReceivedHello&) {
  try {
    process_of(connection);  // refuses strangers
  } catch (const Error&) {
    return;
  }
  std::erase_if(openers_, has_hung_up);
  const bool was_sent =
      send_hello(connection, {.token = token_, .rank = 0}, {&per_process<Heap>().memory()});
  if (was_sent) openers_.push_back(std::move(connection));
}

OpenedWindow::OpenedWindow(std::shared_ptr<const PeerProcess> process, UniqueFd connection,
                           Mapping control, Mapping data, const WindowView& view)
    : process_(std::move(process)),
      connection_(std::move(connection)),
      control_(std::move(control)),
      data_(std::move(data)),
      view_(view) {}

std::shared_ptr<OpenedWindow> OpenedWindow::open(const std::string& address, const std::string& who,
                                                 const std::function<void()>& check) {
  auto text = in_classic_locale<std::istringstream>(address);
  const Address listener = Address::read(text);
  Places places{};
  text >> places.control >> places.num_words >> places.data.offset >> places.data.num_bytes >>
      places.is_writable;
  if (!text) fail_transport(join("the address of the window of ", who, " is damaged: ", address));
  Answer answer =
      ask(listener, /*own_rank=*/0, {}, who, join(who, " has closed the window"), check);
  if (answer.descriptors.size() != 1) {
    fail_transport(with_errno(join("cannot map the window of ", who), EMFILE) +
                   "; raise `ulimit -n`");
  }
  const UniqueFd& heap = answer.descriptors[0];
  const Span control{places.control, WindowControl::num_bytes(places.num_words)};
  const size_t heap_bytes = sealed_bytes(heap).value_or(0);
  for (const Span& part : {control, places.data}) {
    if (part.offset <= heap_bytes && part.num_bytes <= heap_bytes - part.offset) continue;
    fail_transport(join("the window of ", who,
                        " lies outside its memory; do all processes run "
                        "the same version of rota?"));
  }
  answer.process->take_words(heap);
  const WindowAccess access = places.is_writable ? WindowAccess::kWrite : WindowAccess::kRead;
  Mapping control_part = map_part(heap, control, access);
  Mapping data_part = map_part(heap, places.data, access);
  const WindowView view{reinterpret_cast<WindowControl*>(in_mapping(control_part, control.offset)),
                        places.num_words,
                        {in_mapping(data_part, places.data.offset), places.data.num_bytes}};
  return std::make_shared<OpenedWindow>(std::move(answer.process), std::move(answer.connection),
                                        std::move(control_part), std::move(data_part), view);
}

}  // namespace rota::transport
