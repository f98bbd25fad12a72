"""Half of a reduction: each rank gets the sums of the pieces of parameters that it owns.

An optimizer of rota.optim updates them and sends parameters back instead of sums. Which rank owns
what depends on the lengths of the parameters alone, not on buckets, so states stay where they are
when DDP makes other buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from rota import _C
from rota.communicator import Communicator


class Piece(NamedTuple):
    """A run of elements of one parameter."""

    begin: int
    num_elems: int
    owner: int
    first_tile: int  # the number of its first tile among those of all parameters


def pieces_of(lengths: Iterable[int], world_size: int) -> list[list[Piece]]:
    """Divides parameters of these lengths among the ranks in whole leaves (csrc/schedule/pieces.h).

    Leaves that are left over go to the ranks in turn, so each rank owns about as much in all, also
    of many short parameters.
    """
    pieces, turn, first_tile = [], 0, 0
    for length in lengths:
        num_each, num_left = divmod(-(-length // _C.LEAF_ELEMS), world_size)
        own, begin = [], 0
        for rank in range(world_size):
            num_leaves = num_each + ((rank - turn) % world_size < num_left)
            end = min(length, begin + num_leaves * _C.LEAF_ELEMS)
            if end > begin:
                own.append(Piece(begin, end - begin, rank, first_tile + begin // _C.TILE_ELEMS))
            begin = end
        pieces.append(own)
        turn = (turn + num_left) % world_size
        first_tile += -(-length // _C.TILE_ELEMS)
    return pieces


class OwnedPiece(NamedTuple):
    """A piece of this rank in a bucket."""

    number: int  # among the pieces of the bucket
    parameter: torch.Tensor
    piece: Piece


class ShardedBucket:
    """The pieces of one bucket, and what its reduction has measured of this rank's."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[Piece]],
        rank: int,
        world_size: int,
    ) -> None:
        self.parameters = list(parameters)
        self.parameter_of: list[torch.Tensor] = []  # by piece
        self.own: list[OwnedPiece] = []
        rows: list[Piece] = []
        begin = 0
        for parameter, some in zip(parameters, pieces, strict=True):
            for piece in some:
                if piece.owner == rank:
                    self.own.append(OwnedPiece(len(rows), parameter, piece))
                rows.append(Piece(begin + piece.begin, *piece[1:]))
                self.parameter_of.append(parameter)
            begin += parameter.numel()
        self._rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._place = rank, world_size
        self.core = self.of(self.parameters)
        self.stats = torch.zeros(_C.SHARD_STATS, dtype=torch.int64, device="cpu")

    def of(self, tensors: Sequence[torch.Tensor]) -> _C.ShardedBucket:
        """The same pieces of other tensors, as long as the parameters."""
        return _C.ShardedBucket([t.detach() for t in tensors], self._rows, *self._place)


class Sharding:
    """The parameters of one optimizer, and the reductions of their gradients."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        communicator: Callable[[], Communicator],
        keeps_gradients: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._communicator = communicator
        self._keeps_gradients = keeps_gradients
        self._pieces: dict[int, list[Piece]] = {}  # by id() of the parameter
        self.reduced: list[ShardedBucket] = []  # in the last backward pass
        self.used: Set[int] = set()  # parameters that it reached on any rank, by id()
        self._totals = False, 0.0
        self.is_pending = False  # there are sums that no step has used

    @property
    def communicator(self) -> Communicator:
        return self._communicator()

    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        if not self._pieces:
            pieces = pieces_of((p.numel() for p in self._parameters), self.communicator.world_size)
            self._pieces = {id(p): own for p, own in zip(self._parameters, pieces, strict=True)}
        return self._pieces[id(parameter)]

    def own_piece(self, parameter: torch.Tensor) -> Piece | None:
        own = (p for p in self.pieces(parameter) if p.owner == self.communicator.rank)
        return next(own, None)

    def bucket_of(self, parameters: Sequence[torch.Tensor]) -> ShardedBucket:
        """Raises ValueError: a parameter is not the optimizer's."""
        own = set(map(id, self._parameters))
        if missing := [p for p in parameters if id(p) not in own]:
            raise ValueError(
                f"rota.optim: a bucket holds a parameter of shape {list(missing[0].shape)} "
                f"that the optimizer does not have; give it all parameters that require a "
                f"gradient"
            )
        return self._cut(parameters, parameters)

    def _cut(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> ShardedBucket:
        """Tensors that have the pieces of these parameters."""
        communicator = self.communicator
        pieces = [self.pieces(p) for p in parameters]
        return ShardedBucket(tensors, pieces, communicator.rank, communicator.world_size)

    def begin(self) -> None:
        """Call it before the first bucket of a backward pass.

        Raises RuntimeError: the sums of the last one would be lost.
        """
        if self.is_pending:
            raise RuntimeError(
                "rota.optim: backward() reduces gradients again before a step has used the last "
                "ones, which cannot be added to; run all but the last backward() of a step under "
                "no_sync(), or call optimizer.zero_grad() if you skip a step"
            )
        self.reduced, self.used = [], frozenset()

    def start(
        self, bucket: ShardedBucket, buffer: torch.Tensor, **options: Any
    ) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a bucket; the buffer is left as it is."""
        self.reduced.append(bucket)
        return self.communicator.reduce_shards_future(bucket.core, buffer, bucket.stats, **options)

    def end(self, loss_scale: float, used: Set[int] | None) -> None:
        """Call it when the backward pass is over. Drops what lies in the gradients, which are no
        averages.

        Args:
            used: as HookState.end(); None: those that have a gradient, of which DDP sees to it.
        """
        parameters = [p for bucket in self.reduced for p in bucket.parameters]
        self.used = {id(p) for p in parameters if p.grad is not None} if used is None else used
        for parameter in parameters:
            parameter.grad = None
        self._totals = self._read_totals(loss_scale)
        self.is_pending = True
        if self._keeps_gradients:
            for bucket in self.reduced:
                self._gather_gradients(bucket, loss_scale)

    def _gather_gradients(self, bucket: ShardedBucket, loss_scale: float) -> None:
        gradients = [torch.zeros_like(p, dtype=torch.float32) for p in bucket.parameters]
        core = bucket.of(gradients)
        core.sums.copy_(bucket.core.sums)
        step = _C.UpdateStep(is_adam=False, size=-1 / loss_scale)
        self.communicator.update_shards(core, [step] * len(bucket.parameter_of))
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            if id(parameter) in self.used:
                parameter.grad = gradient.to(parameter.dtype)

    def totals(self) -> tuple[bool, float]:
        """Whether any gradient is not finite, and the sum of the squares of all."""
        return self._totals

    def _read_totals(self, loss_scale: float) -> tuple[bool, float]:
        own = torch.stack([bucket.stats for bucket in self.reduced])
        world_size = self.communicator.world_size
        stats = torch.empty(world_size, *own.shape, dtype=own.dtype, device="cpu")
        self.communicator.all_gather(stats, own)
        squares, found = 0, False
        for num_non_finite, *words in stats.view(-1, _C.SHARD_STATS).tolist():
            found |= num_non_finite != 0
            squares += sum((word & (1 << 64) - 1) << 64 * i for i, word in enumerate(words))
        if found:
            return True, math.nan
        return False, squares / (1 << -_C.SQUARES_UNIT_EXPONENT) / loss_scale**2

    def gather(
        self, name: str, states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> dict[int, torch.Tensor]:
        """Whole float32 tensors from what each rank has of its own pieces; a collective call.

        Args:
            name: of what is gathered, in the state of each parameter; zeros where it lacks it.

        Returns:
            By id() of the parameter, in its shape.
        """
        wholes = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        bucket = self._cut(wholes, self._parameters)
        for parameter, whole in zip(self._parameters, wholes, strict=True):
            part, piece = states.get(parameter, {}).get(name), self.own_piece(parameter)
            if part is not None and piece is not None:
                in_memory(whole)[piece.begin : piece.begin + piece.num_elems] = part
        self.communicator.update_shards(bucket.core, [None] * len(bucket.parameter_of))
        return {id(p): whole for p, whole in zip(self._parameters, wholes, strict=True)}


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, as pieces count them."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
