"""Training whose bits do not depend on the number of ranks: a step is a fixed number of logical
shards, each with its own data and random numbers, whose gradients are added in one fixed tree.

With one micro-batch per shard this is EasyScale's idea (Li et al., SC 2023: virtual workers with
their own random state), with a tree of sums instead of a recorded order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rota import _torch, options
from rota._C import schedule
from rota.gradients.reduction import each_complete, reduce_gradients
from rota.gradients.rounding import split_mix_64
from rota.gradients.state import HookState

Gradient = torch.Tensor | None


class LogicalShards:
    """The logical shards of this rank, and their gradients.

    A step is num_shards forward and backward passes, spread evenly over the ranks in aligned blocks
    of 2**k. This rank adds the gradients of its block in a balanced binary tree, which reduce()
    continues over the ranks: any number of ranks up to num_shards gives the same bits. This rank
    keeps at most log2(len(shards)) copies of its gradients.

    Args:
        model: on every rank with the same parameters, as DistributedDataParallel makes them. One of
            these runs under no_sync().
        num_shards: a power of two, at least the number of ranks.
        state: how gradients travel, made with rota.HookState(num_shards=num_shards); None: in
            float32, over the default group. A narrower wire_dtype rounds the sum of each rank's
            block, so the bits then depend on the number of ranks.
        seed: of data order and random numbers, in [0, 2**64); the same on every rank.

    Raises:
        ValueError: num_shards is not a power of two, is less than the number of ranks, or is not
            the state's.

    Warns:
        UserWarning: the model has BatchNorm layers, whose statistics follow the ranks, or is on
            CUDA without torch.use_deterministic_algorithms.

    Example:
        >>> shards = rota.LogicalShards(model, num_shards=8, seed=1)
        >>> for _ in range(num_steps):
        ...     for shard in shards:
        ...         with shards.backward_of(shard):
        ...             inputs, targets = dataset[shards.samples(shard, len(dataset), batch_size=4)]
        ...             loss_of(model(inputs), targets).backward()
        ...     shards.reduce()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_shards: int,
        *,
        state: HookState | None = None,
        seed: int = 0,
    ) -> None:
        options.check_model("rota.LogicalShards", model)
        options.check_seed("rota.LogicalShards", seed)
        if state is None:
            state = HookState(wire_dtype=torch.float32, num_shards=num_shards)
        if not isinstance(state, HookState):
            raise TypeError(
                f"rota.LogicalShards: state is of type {type(state).__name__}, expected a "
                f"rota.HookState"
            )
        if state.num_shards != num_shards:
            raise ValueError(
                f"rota.LogicalShards: num_shards is {num_shards}, the state's {state.num_shards}; "
                f"make it with rota.HookState(num_shards={num_shards})"
            )
        self.state = state
        self.num_shards = num_shards
        self.num_steps = 0  # that reduce() has ended
        self._model = model
        self._seed = seed
        self._block = range(0)
        self._world_size = 0
        self._num_done = 0  # shards of this step
        # By parameter: the sums of subtrees that no addition has joined yet, and memory for more.
        self._sums: list[list[Gradient]] = []
        self._spares: list[list[torch.Tensor]] = []
        # An epoch, and its samples.
        self._order = -1, torch.empty(0, dtype=torch.int64, device="cpu")
        if dist.is_initialized():  # otherwise it is for a membership, which calls regroup()
            self.regroup()
        _warn_about(model)

    def regroup(self) -> None:
        """Takes this rank's block among the ranks that the group has now; drops an unfinished step.

        For a default group that was made anew, with other ranks (rota.elastic). Does not wait.
        Raises ValueError: num_shards is less than the number of ranks.
        """
        world_size = dist.get_world_size(self.state.group)
        if self.num_shards < world_size:
            raise ValueError(
                f"rota.LogicalShards: num_shards is {self.num_shards}, expected at least the "
                f"number of ranks, {world_size}"
            )
        block = schedule.shards_of(self.num_shards, world_size, dist.get_rank(self.state.group))
        self._block = range(block.first_shard, block.first_shard + block.num_shards)
        self._world_size = world_size
        self._drop()

    def __iter__(self) -> Iterator[int]:
        """The numbers of this rank's shards, in the order in which their passes must run."""
        return iter(self._block)

    def __len__(self) -> int:
        return len(self._block)

    @contextlib.contextmanager
    def backward_of(self, shard: int, *, num_backwards: int = 1) -> Iterator[None]:
        """A context for all forward and backward passes of one shard in this step.

        torch's random numbers in it depend on the seed, the step and the shard alone; outside they
        go on as if it had not been there. If it is left by an exception, the step's gradients are
        dropped, and the step starts again.

        Args:
            num_backwards: backward passes in the context that reach a parameter. A gradient is
                added to the tree as soon as it has come so often, while it is in the caches.

        Raises:
            RuntimeError: shards run in another order, a parameter has a gradient before, or a
                gradient comes more often than num_backwards.
        """
        self._check_next(shard)
        parameters = self._parameters()
        if any(parameter.grad is not None for parameter in parameters):
            self._drop()
            raise RuntimeError(
                "rota.LogicalShards: a parameter has a gradient from elsewhere; call "
                "optimizer.zero_grad() after every step"
            )
        no_sync: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(self._model, DistributedDataParallel):
            no_sync = self._model.no_sync()
        on_cuda = [p.device for p in parameters if p.is_cuda][:1]
        try:
            with (
                no_sync,
                torch.random.fork_rng(on_cuda),
                self._adding(parameters, num_backwards),
            ):
                # torch.manual_seed, without the devices that are not used.
                cuda = [torch.cuda.default_generators[device.index] for device in on_cuda]
                for generator in (torch.default_generator, *cuda):
                    generator.manual_seed(self._random_seed(shard + 1))
                yield
        except BaseException:
            for parameter in parameters:
                parameter.grad = None
            self._drop()
            raise
        self._num_done += 1

    def samples(self, shard: int, num_samples: int, batch_size: int) -> torch.Tensor:
        """The samples of a shard in this step: each sample once in an epoch, in random order.

        Args:
            num_samples: of the dataset; those that do not fill a step are left out of an epoch, and
                too few for one step are a ValueError.
            batch_size: of one shard.

        Returns:
            int64 [batch_size], indices in [0, num_samples).
        """
        steps_in_epoch = num_samples // (self.num_shards * batch_size)
        if steps_in_epoch == 0:
            raise ValueError(
                f"rota.LogicalShards: {num_samples} samples, expected at least {self.num_shards} "
                f"shards * {batch_size} for one step"
            )
        epoch, step = divmod(self.num_steps, steps_in_epoch)
        if self._order[0] != epoch or len(self._order[1]) != num_samples:
            generator = torch.Generator().manual_seed(split_mix_64(self._seed, 2 * epoch))
            order = torch.randperm(
                num_samples, generator=generator, dtype=torch.int64, device="cpu"
            )
            self._order = epoch, order
        begin = (step * self.num_shards + shard) * batch_size
        return self._order[1][begin : begin + batch_size]

    def reduce(self) -> None:
        """Sets every parameter's gradient to the mean over all logical shards; ends the step.

        Blocks as rota.reduce_gradients does, on every rank of the group.

        Raises:
            RuntimeError: not all shards of this rank have run in this step, or the number of ranks
                is another since.
            What rota.reduce_gradients raises.
        """
        if self._num_done < len(self._block):
            raise RuntimeError(
                f"rota.LogicalShards: reduce() after {self._num_done} of this rank's "
                f"{len(self._block)} shards; run them all, each in backward_of()"
            )
        if self._world_size != dist.get_world_size(self.state.group):
            raise RuntimeError(
                f"rota.LogicalShards: this step was begun on {self._world_size} ranks, the group "
                f"has {dist.get_world_size(self.state.group)} now; call regroup() and run the step "
                f"again"
            )
        for parameter, (gradient,) in zip(self._parameters(), self._sums, strict=True):
            parameter.grad = gradient
        self._drop()
        reduce_gradients(self._parameters(), self.state)
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The position in data and random numbers; the same on every rank."""
        return {"num_shards": self.num_shards, "seed": self._seed, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on after the last whole step of another run, with any number of ranks.

        Raises TypeError or ValueError: it is of something else, or of another number of shards.
        """
        options.check_state_dict("rota.LogicalShards", state_dict, self.state_dict())
        if state_dict["num_shards"] != self.num_shards:
            raise ValueError(
                f"rota.LogicalShards: the saved run had {state_dict['num_shards']} shards, this "
                f"one has {self.num_shards}; they must be equal for equal bits"
            )
        self._seed = state_dict["seed"]
        self.num_steps = state_dict["num_steps"]
        self._order = (-1, self._order[1])
        self._drop()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _random_seed(self, stream: int) -> int:
        # Data order uses the even numbers of the first generator.
        return split_mix_64(split_mix_64(self._seed, 2 * self.num_steps + 1), stream)

    def _check_next(self, shard: int) -> None:
        if self._num_done < len(self._block) and shard == self._block[self._num_done]:
            return
        expected = "reduce()"
        if self._num_done < len(self._block):
            expected = f"shard {self._block[self._num_done]}"
        raise RuntimeError(
            f"rota.LogicalShards: shard {shard}, expected {expected}; a step runs this rank's "
            f"shards {list(self._block)} in this order, and then reduce()"
        )

    @contextlib.contextmanager
    def _adding(self, parameters: list[torch.Tensor], num_backwards: int) -> Iterator[None]:
        """A context that takes each gradient when it is complete, the others at its end."""
        if self._num_done == 0:
            self._sums = [[] for _ in parameters]
        if len(self._spares) != len(parameters):
            self._spares = [[] for _ in parameters]
        place_of = {id(parameter): place for place, parameter in enumerate(parameters)}

        def add(parameter: torch.Tensor) -> None:
            self._add(place_of[id(parameter)], parameter)

        def describe(parameter: torch.Tensor) -> str:
            return f"rota.LogicalShards: a gradient of shape {list(parameter.shape)}"

        with each_complete(parameters, num_backwards, add, describe, "of a shard") as num_seen:
            yield
        for parameter in parameters:
            if num_seen[id(parameter)] < num_backwards:
                add(parameter)

    @torch.no_grad()
    def _add(self, place: int, parameter: torch.Tensor) -> None:
        """Takes a shard's gradient from a parameter, and adds it as far as the tree goes."""
        gradient, parameter.grad = parameter.grad, None
        sums, spares = self._sums[place], self._spares[place]
        # Shard i ends as many subtrees as i has trailing ones.
        num_additions = (~self._num_done & (self._num_done + 1)).bit_length() - 1
        # The memory of the last two gradients gets the result, and stays with the parameter. That
        # of the others goes back to autograd: new memory costs more than a copy.
        num_left = len(self._block) - 1 - self._num_done
        total = _copy_of(gradient, spares) if num_additions == 0 and num_left > 1 else gradient
        for i in range(num_additions):
            earlier = sums.pop()
            if num_left == 0 and i > 0:
                total, freed = _sum(total, earlier)
            else:
                total, freed = _sum(earlier, total)
            if freed is not None and i > 0:
                spares.append(freed)
        sums.append(total)

    def _drop(self) -> None:
        self._sums = []
        self._num_done = 0


def _copy_of(gradient: Gradient, spares: list[torch.Tensor]) -> Gradient:
    if gradient is None:
        return None
    # Other parameters may be trained than in the step before.
    fits = bool(spares) and (spares[-1].shape, spares[-1].dtype) == (gradient.shape, gradient.dtype)
    return (spares.pop() if fits else torch.empty_like(gradient)).copy_(gradient)


def _sum(into: Gradient, other: Gradient) -> tuple[Gradient, Gradient]:
    """The sum, in the memory of the first that is there, and what has become free. None counts as
    zeros, as between ranks; 0 + -0 is 0."""
    if into is None or other is None:
        present = other if into is None else into
        return present.add_(0.0) if present is not None else None, None
    return into.add_(other), other


def _warn_about(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if _torch.is_batch_norm(module) and module.training:
            warnings.warn(
                f"rota.LogicalShards: {name or 'the model'} is a {type(module).__name__}, whose "
                f"running statistics depend on which shards a rank has; use GroupNorm or "
                f"LayerNorm, or put it into eval()",
                stacklevel=3,
            )
    is_on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    if is_on_cuda and not torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            "rota.LogicalShards: a model on CUDA may use kernels whose bits differ from run to "
            "run; call torch.use_deterministic_algorithms(True)",
            stacklevel=3,
        )
