// What windows over several hosts share in a process: the ranks of other hosts, and the windows
// that these may access. Made once for a group of ranks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hosts/connections.h"
#include "hosts/window_peer.h"
#include "schedule/hosts.h"

namespace rota::hosts {

class RemoteWindow;

class WindowService {
 public:
  // number: of this service among all over these connections. Connections are of all ranks.
  WindowService(ConnectionsPtr connections, schedule::Hosts hosts, int rank, int number);
  // Waits a moment for what has been asked, so that others hear of windows that are closed.
  ~WindowService();

  int rank() const { return rank_; }
  const schedule::Hosts& hosts() const { return hosts_; }
  bool is_remote(int rank) const { return peers_[static_cast<size_t>(rank)] != nullptr; }
  WindowPeer& peer(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  std::string describe(int rank) const { return hosts_.describe(rank); }
  // Whether no rank is lost; others need another service.
  bool is_usable();

  // From now on requests to window `number` go to it. Ranks agree on numbers.
  void open(uint64_t number, std::shared_ptr<RemoteWindow> window);
  // They are refused. Those that are being served may still run.
  void close(uint64_t number);

 private:
  size_t serve(int source, WindowPeer::Request& request);

  const ConnectionsPtr connections_;
  const schedule::Hosts hosts_;
  const int rank_;

  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<RemoteWindow>> windows_;  // guarded by it
  std::vector<std::unique_ptr<WindowPeer>> peers_;  // by rank; null: this host's. Go first.
};

}  // namespace rota::hosts
