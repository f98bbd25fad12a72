"""Why windows over several hosts have a thread for each rank of another host (csrc/README.md).

One thread could take in the packets of all, if Gloo could wait for whichever message comes first,
or give up a recv. Where this fails, it can.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ranks import Rank, Ranks
from rota import _torch

# It takes too long to be through before its sender stops; few of its pages are ever touched.
LONG = 1 << 30


def wait_for_any_source(rank: Rank) -> None:
    rank.init("gloo")
    gloo = _torch.backend_of(dist.group.WORLD, torch.device("cpu"))
    one = torch.ones(1, dtype=torch.uint8)
    if rank.rank == 1:
        rank.hear()
        gloo.send([torch.zeros(LONG, dtype=torch.uint8)], 0, 7)
        rank.tell()
        os.kill(os.getpid(), signal.SIGSTOP)  # as a host that vanishes
    if rank.rank == 2:
        rank.hear()
        gloo.send([one], 0, 7).wait()
        rank.hear()
        return
    recvs = [torch.empty(LONG, dtype=torch.uint8) for _ in range(2)]
    first, second = [gloo.recv_anysource([recv], 7) for recv in recvs]
    rank.tell()
    second.wait()
    assert recvs[1][0] == 1, "the message of rank 2 is there, behind what rank 1 has begun"
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        first.wait(timedelta(seconds=1))
    # That has broken the connections to every rank.
    with pytest.raises(RuntimeError, match="Application timeout caused pair closure"):
        gloo.recv([one], 2, 8).wait()


def test_recv_from_any_source_waits_for_the_rank_that_began_first() -> None:
    with Ranks(3, wait_for_any_source) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        ranks.hear(1)
        ranks.tell(2)
        ranks.hear_result(0)
        ranks.kill(1)
        ranks.tell(2)
        ranks.results(killed=[1])
