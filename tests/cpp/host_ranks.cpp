#include "host_ranks.h"

#include <barrier>
#include <memory>
#include <vector>

#include "hosts/executor.h"
#include "letters.h"
#include "transport/thread_transport.h"

namespace rota::test {

void HostRank::run(const Call& call, const cpu::Buffers& buffers) {
  hosts::execute({bridge, scratch, call, {}, buffers});
}

void run_on_hosts(std::string_view letters, const std::function<void(HostRank&)>& body,
                  const HostsOptions& options) {
  const schedule::Hosts hosts = hosts_of(letters);
  std::vector<std::vector<std::unique_ptr<transport::Transport>>> transports;
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    transports.push_back(
        transport::ThreadTransport::make_world(hosts.local_size(host), options.geometry));
    for (auto& transport : transports.back()) {
      transport->set_numbering({hosts.ranks_of(host), hosts.world_size()});
    }
  }
  MemoryNetwork data(MemoryNetwork::Kind::kData), mail(MemoryNetwork::Kind::kLetters);
  if (options.cut_off) {
    data.cut_off(*options.cut_off);
    mail.cut_off(*options.cut_off);
  }
  std::barrier joint_step(hosts.world_size());
  FirstException first_exception;
  run_threads(hosts.world_size(), [&](int rank) {
    const auto [host, local_rank] = hosts.place_of(rank);
    auto& transport = transports[static_cast<size_t>(host)][static_cast<size_t>(local_rank)];
    auto local = std::make_shared<Communicator>(std::move(transport), options.timeout,
                                                options.check_interrupt);
    hosts::Bridge bridge(hosts, rank, local, data.connect(rank), mail.connect(rank));
    joint_step.arrive_and_wait();
    bridge.expect_signs();
    HostRank host_rank{bridge, {}};
    try {
      body(host_rank);
    } catch (const std::exception& exception) {
      first_exception.keep();
      bridge.abort(exception.what());  // or the others would wait for this rank
    }
  });
  first_exception.rethrow();
}

}  // namespace rota::test
