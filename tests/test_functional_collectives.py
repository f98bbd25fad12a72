"""torch's functional collectives under torch.compile on rota, against the same on Gloo, eagerly."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ranks import Rank, on_ranks
from test_compile import TIMEOUT_S, compiled, small_integers


def _every_collective(x: Tensor, group: Any) -> list[Tensor]:
    """On 2 ranks, with x of shape (4, 6); results go into further collectives without a wait."""
    gathered = funcol.all_gather_tensor(x, 0, group)
    summed = funcol.all_reduce(x * 2, "sum", group)
    largest, smallest = funcol.all_reduce_coalesced([x + 1, x - 1], "max", group)
    first, second = funcol.all_gather_into_tensor_coalesced([x, x[:2]], group)
    part, other_part = funcol.reduce_scatter_tensor_coalesced(
        [gathered, x.clone()], "sum", [0, 0], group
    )
    return [
        gathered,
        summed,
        largest,
        smallest,
        first,
        second,
        part,
        other_part,
        funcol.reduce_scatter_tensor(gathered, "sum", 0, group),
        funcol.reduce_scatter_tensor(x.t().contiguous(), "max", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.all_to_all_single(x, [2, 2], [2, 2], group),
        funcol.broadcast(x + 1, 1, group),
        funcol.all_reduce(funcol.all_reduce(summed, "min", group), "sum", group) * 2,
    ]


def _waited(tensors: list[Tensor]) -> list[Tensor]:
    return [funcol.wait_tensor(tensor) for tensor in tensors]


def _late_sum(rank: Rank, x: Tensor) -> Tensor:
    """All_reduce that is not done when it returns, because rank 1 comes late."""
    if rank.rank == 1:
        time.sleep(0.2)
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def _check_every_collective(rank: Rank, gloo: Any) -> None:
    x = small_integers(rank.rank, 4, 6)
    expected = _waited(_every_collective(x, gloo))
    got = _waited(compiled(_every_collective, "inductor")(x, dist.group.WORLD))
    for number, (on_rota, on_gloo) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(on_rota, on_gloo), number


def _check_nested_results_are_waited_for(rank: Rank) -> None:
    """pytorch#180614"""

    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    run = compiled(double, "inductor")
    x = torch.full((1000,), float(rank.rank + 1))
    assert run(_late_sum(rank, x)).eq(6).all()
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(x, mesh, [Partial()])
    if rank.rank == 1:
        time.sleep(0.2)
    whole = partial.redistribute(placements=[Replicate()], async_op=True)
    assert isinstance(whole._local_tensor, funcol.AsyncCollectiveTensor)
    assert run(whole).to_local().eq(6).all()


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compiled_functional_collectives_equal_gloo(rank: Rank) -> None:
    rank.init(timeout_s=TIMEOUT_S)
    gloo = dist.new_group(backend="gloo")
    _check_every_collective(rank, gloo)
    _check_nested_results_are_waited_for(rank)
