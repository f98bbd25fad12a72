#include "hosts/remote_window.h"

#include <algorithm>
#include <mutex>

#include "cpu/element_loops.h"

namespace rota::hosts {
namespace {

using Kind = WindowPacket::Kind;

constexpr std::string_view kHasClosed =
    "has closed its window; make a new one with the ranks that are left";

// The elements of a packet of contributions: whole parts, so that blocks are counted from the
// contribution's start, as on one host.
uint64_t elems_per_packet(size_t packet_bytes, size_t elem_bytes,
                          const std::optional<WireFormat>& wire) {
  if (!wire) return packet_bytes / elem_bytes;
  return wire->capacity(packet_bytes, Window::kPartElems);
}
static_assert(WireFormat{DType::kFloat32}.capacity(kLeastPacketDataBytes, Window::kPartElems) > 0);

// What only a rank with another build would send.
[[noreturn]] void refuse(const std::string& name, std::string_view what) {
  throw RemoteFailure{ErrorKind::kValue, join(name, " refuses a request: ", what)};
}

}  // namespace

void RemoteWindow::open(const std::shared_ptr<RemoteWindow>& self, Window& window) {
  {
    const std::lock_guard lock(mutex_);
    window_ = &window;
  }
  service_.open(number_, self);
}

void RemoteWindow::close() {
  service_.close(number_);
  {
    const std::lock_guard lock(mutex_);
    if (window_ == nullptr) return;
    window_ = nullptr;
  }
  for (int rank = 0; rank < service_.hosts().world_size(); ++rank) {
    if (service_.is_remote(rank)) service_.peer(rank).try_ask(packet(Kind::kClosed));
  }
}

// ---- asks

void RemoteWindow::put(int target, uint64_t first_byte, std::span<const std::byte> data,
                       WaitObserver& observer) {
  WindowPeer::Call call(service_.peer(target), observer);
  for (std::span<const std::byte> part; !data.empty(); data = data.subspan(part.size())) {
    part = data.first(std::min(call.packet_bytes(), data.size()));
    WindowPacket request = packet(Kind::kPut);
    request.first = first_byte;
    first_byte += part.size();
    request.num = request.data_bytes = part.size();
    call.ask(request, [&](std::byte* place) { std::memcpy(place, part.data(), part.size()); });
  }
  call.finish();
}

void RemoteWindow::get(int target, uint64_t first_byte, std::span<std::byte> data,
                       WaitObserver& observer) {
  WindowPeer::Call call(service_.peer(target), observer);
  for (std::span<std::byte> part; !data.empty(); data = data.subspan(part.size())) {
    part = data.first(std::min(call.packet_bytes(), data.size()));
    WindowPacket request = packet(Kind::kGet);
    request.first = first_byte;
    first_byte += part.size();
    request.num = part.size();
    call.ask(request, nullptr, part);
  }
  call.finish();
}

void RemoteWindow::accumulate(int target, uint64_t offset, const std::byte* data, DType dtype,
                              uint64_t num_elems, const std::optional<WireFormat>& wire,
                              WaitObserver& observer) {
  WindowPeer::Call call(service_.peer(target), observer);
  const size_t elem_bytes = info(dtype).num_bytes;
  uint64_t part_elems;
  for (uint64_t begin = 0; begin < num_elems; begin += part_elems) {
    part_elems =
        std::min(elems_per_packet(call.packet_bytes(), elem_bytes, wire), num_elems - begin);
    const std::byte* part = data + begin * elem_bytes;
    WindowPacket request = packet(Kind::kAccumulate);
    request.first = offset + begin;
    request.num = part_elems;
    request.dtype = static_cast<uint32_t>(dtype);
    if (wire) {
      request.has_wire = 1;
      request.wire_dtype = static_cast<uint32_t>(wire->dtype);
      request.is_block_scaled = wire->is_block_scaled ? 1 : 0;
      request.data_bytes = wire->num_bytes(part_elems);
    } else {
      request.data_bytes = part_elems * elem_bytes;
    }
    call.ask(request, [&](std::byte* place) {
      if (!wire) {
        std::memcpy(place, part, request.data_bytes);
        return;
      }
      cpu::element_loops().wire(*wire).encode(reinterpret_cast<const float*>(part),
                                              wire->place(place, part_elems), part_elems, 1);
    });
  }
  call.finish();
}

void RemoteWindow::ask(int target, const WindowPacket& packet, WaitObserver& observer) {
  WindowPeer::Call call(service_.peer(target), observer);
  call.ask(packet);
  call.finish();
}

void RemoteWindow::signal(int target, int channel, WaitObserver& observer) {
  WindowPacket request = packet(Kind::kSignal);
  request.channel = static_cast<uint32_t>(channel);
  ask(target, request, observer);
}

bool RemoteWindow::is_open(int target, WaitObserver& observer) {
  try {
    ask(target, packet(Kind::kIsOpen), observer);
    return true;
  } catch (const RemoteFailure&) {
    return false;
  }
}

std::optional<std::string> RemoteWindow::loss_of(int target) {
  if (has_closed_[static_cast<size_t>(target)]) return std::string(kHasClosed);
  return service_.peer(target).loss();
}

// ---- serves

size_t RemoteWindow::serve(int source, WindowPeer::Request& request) {
  if (request.packet.kind == Kind::kClosed) {
    has_closed_[static_cast<size_t>(source)] = true;
    return 0;
  }
  request.lock = std::shared_lock(mutex_);
  if (window_ == nullptr || !window_->is_alive(service_.rank())) {
    throw RemoteFailure{ErrorKind::kPeerFailed,
                        join(service_.describe(service_.rank()), ' ', kHasClosed)};
  }
  try {
    return serve_open(source, request);
  } catch (const Error& error) {
    throw RemoteFailure{error.kind(), error.what()};
  }
}

// Nothing is written before all of the request has been checked.
size_t RemoteWindow::serve_open(int source, WindowPeer::Request& request) {
  const WindowPacket& packet = request.packet;
  switch (packet.kind) {
    case Kind::kPut:
      if (packet.num != packet.data_bytes) break;
      window_->serve_put(packet.first, request.data);
      return 0;
    case Kind::kGet:
      if (packet.num > kPacketDataBytes) break;
      window_->serve_get(packet.first, {request.answer_data, packet.num});
      return packet.num;
    case Kind::kAccumulate:
      serve_accumulate(request);
      return 0;
    case Kind::kSignal:
      window_->serve_signal(source, static_cast<int>(packet.channel));
      return 0;
    case Kind::kIsOpen:
      return 0;
    case Kind::kClosed:
    case Kind::kPing:
    case Kind::kDone:
    case Kind::kFailed:
    case Kind::kBusy:
      break;
  }
  refuse(service_.describe(service_.rank()), "its length is wrong");
}

void RemoteWindow::serve_accumulate(WindowPeer::Request& request) {
  const WindowPacket& packet = request.packet;
  const std::string name = service_.describe(service_.rank());
  if (packet.dtype != static_cast<uint32_t>(dtype_) || !info(dtype_).is_reducible ||
      info(dtype_).accumulate != dtype_) {
    refuse(name, "its dtype is not the window's");
  }
  const std::optional<WireFormat> wire = packet.wire();
  if (wire &&
      (packet.wire_dtype >= kNumDTypes || !is_wire_dtype(wire->dtype) ||
       (wire->is_block_scaled && !has_block_scaling(wire->dtype)) || dtype_ != DType::kFloat32)) {
    refuse(name, "its wire format is unknown");
  }
  const size_t elem_bytes = info(dtype_).num_bytes;
  if (packet.num > elems_per_packet(kPacketDataBytes, elem_bytes, wire) ||
      packet.data_bytes != (wire ? wire->num_bytes(packet.num) : packet.num * elem_bytes)) {
    refuse(name, "its length is wrong");
  }
  window_->serve_accumulate(packet.first, request.data.data(), dtype_, packet.num, wire,
                            [&] { request.peer.send_busy(); });
}

}  // namespace rota::hosts
