"""Runs a function on ranks of several hosts, which benchmarks/host_network.py simulates.

Whoever may not make network namespaces skips these tests, but not CI: it must run them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from host_network import HostNetwork, NotAvailable, enter_namespace, rank_environments
from ranks import Place, Ranks


class Hosts(HostNetwork):
    """Hosts with ranks; a context manager, which leaves nothing behind.

    Ranks are numbered host by host. Stores are at the switch: a rank whose link is down or whose
    packets are dropped does not reach them either, and those of other hosts do. Ranks of one host
    share ROTA_HOST_ID and the namespace, those of different hosts neither.

    Args:
        num_ranks_per_host: host by host.
        rate: of each link in each direction, such as "1gbit"; None: as fast as the CPU.

    Example:
        >>> with Hosts((2, 2), "100mbit") as hosts, hosts.start(reduce_until_error) as ranks:
        ...     hosts.drop_traffic(1)
        ...     ranks.results()
    """

    def __init__(self, num_ranks_per_host: Sequence[int] = (2, 2), rate: str | None = None) -> None:
        super().__init__(len(num_ranks_per_host), rate)
        self.num_ranks_per_host = tuple(num_ranks_per_host)

    def __enter__(self) -> Hosts:
        try:
            super().__enter__()
        except NotAvailable as reason:
            text = f"no hosts can be simulated: {reason}"
            if os.environ.get("CI"):
                pytest.fail(f"{text}; in CI they must be")
            pytest.skip(text)
        return self

    def ranks_of(self, host: int) -> list[int]:
        """The ranks of one host, for example to kill them."""
        first = sum(self.num_ranks_per_host[:host])
        return list(range(first, first + self.num_ranks_per_host[host]))

    def start(
        self,
        function: Callable[..., Any],
        *args: object,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Ranks:
        """Starts `function(rank, *args)` on every rank of every host; see Ranks.

        Each start has an empty store, also for `init_process_group()` without arguments.
        """
        environments = rank_environments(self.num_ranks_per_host, self.serve_store())
        places = [
            Place(
                functools.partial(enter_namespace, self.hosts[int(values["GROUP_RANK"])].path),
                values,
            )
            for values in environments
        ]
        return Ranks(len(places), function, *args, env=env, timeout_s=timeout_s, places=places)

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Runs `function(rank, *args)` on every rank and returns what each returned, by rank."""
        with self.start(function, *args, env=env, timeout_s=timeout_s) as ranks:
            return ranks.results()
