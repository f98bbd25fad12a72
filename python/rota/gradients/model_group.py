"""The norm and found_inf of a model whose parameters lie on several ranks.

Each pipeline stage and each tensor-parallel rank reduces its own parameters over the ranks that
hold the same ones. To clip by one norm and to skip the same step, the ranks of one model then sum
what they have found: two float64 numbers each. The sum starts as soon as a rank's gradients are
reduced, and nobody waits for it before the norm is asked for. A rank that waited in its backward
pass could wait for a stage which itself waits for this rank's activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from rota.communicator import Communicator
from rota.errors import RotaError
from rota.sharding import as_dtensor, local_of, num_replicas

Replicas = Callable[[torch.Tensor], int]


class ModelGroup:
    """The ranks that together hold one model; making it is a collective call over them. `replicas`
    is as in HookState."""

    def __init__(self, group: dist.ProcessGroup, replicas: Replicas | None) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.asks_replicas = replicas is not None
        self._replicas = replicas
        self._communicator = Communicator(group)
        self._communicator.barrier()  # connects the ranks, so that start() waits for nobody

    def check_results(self) -> None:
        self._communicator.check_results()

    def start(
        self, stats: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Sums the stats of this rank's buckets (float64: number of non-finite elements, sum of
        squares) over the ranks, counting each of their parameters once.

        Returns a future of float64 [2], with the same bits on every rank.
        """
        try:
            totals = self._own_totals(stats, parameters)
        except Exception as error:
            self.abort(str(error))
            raise
        return self._communicator.all_reduce_future(totals, "sum", None)

    def abort(self, reason: str) -> None:
        """Makes the other ranks' sums fail with this reason."""
        with contextlib.suppress(RotaError):  # an error here would only hide `reason`
            self._communicator.abort(reason)

    def _own_totals(
        self, stats: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """This rank's term of the sum, on the device of its stats if they are all on one."""
        devices = {row.device for row in stats}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for row in stats:
            totals += row.to(device)
        counted = totals[1].clone()
        for parameter in parameters:
            replicas = self._num_replicas(parameter)
            if replicas > 1 and parameter.grad is not None:
                counted -= _sum_of_squares(parameter.grad).to(device) * (1 - 1 / replicas)
        # A sum that is not finite stays what it is, however many ranks count it.
        totals[1] = torch.where(totals[1].isfinite(), counted.clamp(min=0.0), totals[1])
        return totals

    def _num_replicas(self, parameter: torch.Tensor) -> int:
        if self._replicas is None or as_dtensor(parameter) is not None:
            return num_replicas(parameter, self.ranks)
        replicas = self._replicas(parameter)
        if not (isinstance(replicas, int) and 1 <= replicas <= len(self.ranks)):
            raise ValueError(
                f"rota.HookState: replicas() of a parameter of shape {list(parameter.shape)} is "
                f"{replicas!r}, expected the number of ranks of model_group that hold it, from 1 "
                f"to {len(self.ranks)}"
            )
        return replicas


def _sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    local = local_of(gradient)
    if local.is_complex():
        local = torch.view_as_real(local)
    norm: torch.Tensor = torch.linalg.vector_norm(local, dtype=torch.float64)
    return norm.square()
