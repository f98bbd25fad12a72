"""torch's one-sided windows (torch 2.15 and newer) on the backend."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Rank, error_of, on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_new_window"), reason="torch has windows from 2.15 on"
)


def new_window(*args: Any) -> Any:
    return dist.distributed_c10d._new_window(*args)


@on_ranks(2)
def test_ranks_use_a_window(rank: Rank) -> None:
    rank.init()
    assert dist.distributed_c10d._supports_window()
    peer = 1 - rank.rank
    tensor = torch.zeros(10)
    window = new_window(tensor)
    window.put(torch.full((4,), float(rank.rank)), peer, 2, False).wait()
    window.signal(peer, False).wait()
    work = window.wait_signal(peer, True)
    work.wait()
    assert tensor[2:6].eq(peer).all() and tensor[6:].eq(0).all()
    assert window.map_remote_tensor(peer)[2:6].eq(rank.rank).all()
    assert window.get_attr(peer).access_type.name == "UNIFIED"
    dist.barrier()
    window.tensor_deregister()
    assert error_of(window.put, tensor, peer, 0, False)[0] == "ValueError"
    window.tensor_register(torch.ones(3, dtype=torch.int64))
    assert window.map_remote_tensor(peer).eq(1).all()
    dist.barrier()


@on_ranks(2)
def test_what_cannot_be_raises(rank: Rank) -> None:
    rank.init()
    window = new_window()
    assert "no tensor is registered" in error_of(window.signal, 0, False)[1]
    window.tensor_register(torch.zeros(2))
    peer = 1 - rank.rank
    options = torch._C._distributed_c10d.WaitSignalOptions()
    options.timeout = timedelta(milliseconds=100)
    errors = [
        error_of(window.wait_signal, peer, False, options),
        error_of(lambda: window.wait_signal(peer, True, options).wait()),
        error_of(window.put, torch.zeros(3), peer, 0, False),
        error_of(window.tensor_register, torch.zeros(2)),
    ]
    dist.barrier()
    kinds = [kind for kind, _ in errors]
    assert kinds == ["Timeout", "Timeout", "ValueError", "ValueError"], errors


@on_ranks(2)
def test_window_between_hosts(rank: Rank) -> None:
    os.environ["ROTA_HOST_ID"] = f"host-{rank.rank}"
    rank.init()
    window = new_window(torch.zeros(4))
    window.put(torch.ones(2), 1 - rank.rank, 1, False)
    window.signal(1 - rank.rank, False)
    window.wait_signal(1 - rank.rank, False)
    dist.barrier()
