#include "hosts/window_service.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "hosts/remote_window.h"

namespace rota::hosts {

using std::chrono::milliseconds;

WindowService::WindowService(ConnectionsPtr connections, schedule::Hosts hosts, int rank,
                             int number)
    : connections_(std::move(connections)), hosts_(std::move(hosts)), rank_(rank) {
  for (int peer = 0; peer < hosts_.world_size(); ++peer) {
    if (hosts_.place_of(peer).host == hosts_.place_of(rank).host) {
      peers_.push_back(nullptr);
      continue;
    }
    peers_.push_back(std::make_unique<WindowPeer>(
        *connections_, peer, kFirstWindowTag + number, describe(peer),
        [this, peer](WindowPeer::Request& request) { return serve(peer, request); }));
  }
}

WindowService::~WindowService() {
  const auto end = std::chrono::steady_clock::now() + kLastWords;
  const auto is_quiet = [](const auto& peer) { return !peer || peer->is_quiet(); };
  while (!std::ranges::all_of(peers_, is_quiet) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  peers_.clear();
}

bool WindowService::is_usable() {
  return std::ranges::none_of(peers_, [](const auto& peer) { return peer && peer->is_lost(); });
}

void WindowService::open(uint64_t number, std::shared_ptr<RemoteWindow> window) {
  const std::lock_guard lock(mutex_);
  windows_[number] = std::move(window);
}

void WindowService::close(uint64_t number) {
  const std::lock_guard lock(mutex_);
  windows_.erase(number);
}

size_t WindowService::serve(int source, WindowPeer::Request& request) {
  const WindowPacket& packet = request.packet;
  if (packet.kind == WindowPacket::Kind::kPing) return 0;
  std::shared_ptr<RemoteWindow> window;
  {
    const std::lock_guard lock(mutex_);
    const auto found = windows_.find(packet.window);
    if (found != windows_.end()) window = found->second;
  }
  if (window) {
    request.owner = window;
    return window->serve(source, request);
  }
  if (packet.kind == WindowPacket::Kind::kClosed) return 0;
  throw RemoteFailure{
      ErrorKind::kPeerFailed,
      join(describe(rank_), " has closed its window; make a new one with the ranks that are left")};
}

}  // namespace rota::hosts
