"""What rota.fused_hook does, for training loops without DDP: pipeline stages, plain loops."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from rota import options
from rota.errors import Mismatch, RotaError
from rota.gradients.packing import PackedBucket, Plan, check_gradient
from rota.gradients.state import HookState, tell_peers, telling_peers
from rota.rendezvous.alike import sides
from rota.sharding import check_same_shards

Parameters = torch.Tensor | Iterable[torch.Tensor]

# Each state's buckets, which its next reduction can use again.
_plans: weakref.WeakKeyDictionary[HookState, Plan] = weakref.WeakKeyDictionary()


def reduce_gradients(
    parameters: Parameters, state: HookState, *, bucket_cap_mb: float = 25.0
) -> None:
    """Averages gradients over the ranks of a state, as rota.fused_hook does in a DDP model.

    Call it after the last backward pass of a step, on every rank of the state's group. Results are
    those of the hook. Gradients are copied to flat buckets, which the state keeps, and back.

    Args:
        parameters: the same list on every rank, dense, of float32, float64, float16, bfloat16 or
            complex dtypes, on the CPU or one CUDA device. Of a DTensor, this rank's shard is
            reduced, which all ranks of the group must hold. Those that require no gradient are left
            out. One whose gradient is None counts as zeros; if it is None on all ranks, it stays
            None.
        state: the options; one state per model.
        bucket_cap_mb: a bucket is full when it has this many MiB. Buckets hold parameters in the
            reverse of their order, as DDP's do.

    Raises:
        TypeError, ValueError: the gradients cannot be used; other ranks raise rota.PeerFailed with
            the text of the error.
        rota.Mismatch: the ranks' lists or their states' options differ.

    Blocks until CPU gradients are reduced; the current stream waits for CUDA gradients.

    Example:
        >>> state = rota.HookState(data_parallel_group, model=stage)
        >>> schedule.step(inputs)
        >>> rota.reduce_gradients(stage.parameters(), state)
        >>> rota.clip_grad_norm_(stage.parameters(), 1.0)
    """
    with telling_peers(state):
        Reduction(parameters, state, bucket_cap_mb).finish()


@contextlib.contextmanager
def overlap_gradients(
    parameters: Parameters,
    state: HookState,
    *,
    num_backwards: int = 1,
    bucket_cap_mb: float = 25.0,
) -> Iterator[None]:
    """A context whose backward passes overlap with rota.reduce_gradients.

    Gradients must not be changed after their last backward pass: divide the loss by the number of
    microbatches, and make a schedule of torch.distributed.pipelining with scale_grads=False.

    A bucket is reduced as soon as all of its gradients have come `num_backwards` times and the
    buckets before it have started, or at the end of the context, which waits for all. If it is left
    by an exception, nothing more is reduced; the other ranks raise it, too, if a bucket had
    started.

    Args:
        parameters, state, bucket_cap_mb: as for rota.reduce_gradients.
        num_backwards: backward passes in the context that reach a parameter, such as a pipeline's
            microbatches.

    Raises:
        RuntimeError: a gradient came more often than num_backwards.
        What rota.reduce_gradients raises.

    Example:
        >>> with rota.overlap_gradients(stage.parameters(), state, num_backwards=num_microbatches):
        ...     schedule.step(inputs)
    """
    with telling_peers(state):
        if num_backwards < 1:
            raise ValueError(
                f"rota.overlap_gradients: num_backwards is {num_backwards}, expected 1 or more"
            )
        reduction = Reduction(parameters, state, bucket_cap_mb)
    try:
        with reduction.on_gradients(num_backwards):
            yield
    except Exception as error:
        if reduction.has_started and not isinstance(error, RotaError):
            tell_peers(state, str(error))
        raise
    with telling_peers(state):
        reduction.finish()


@contextlib.contextmanager
def each_complete(
    parameters: Iterable[torch.Tensor],
    num_backwards: int,
    on_complete: Callable[[torch.Tensor], None],
    describe: Callable[[torch.Tensor], str],
    where: str,
) -> Iterator[Counter[int]]:
    """A context that calls `on_complete` with each parameter whose gradient has come so many times.

    Gives how often each has come, by id(). `describe` and `where` are for the RuntimeError if one
    comes more often.
    """
    num_seen = Counter[int]()

    def on_gradient(parameter: torch.Tensor) -> None:
        num_seen[id(parameter)] += 1
        if num_seen[id(parameter)] > num_backwards:
            raise RuntimeError(
                f"{describe(parameter)} has come {num_seen[id(parameter)]} times, expected "
                f"{num_backwards}; pass the number of backward passes {where} as num_backwards"
            )
        if num_seen[id(parameter)] == num_backwards:
            on_complete(parameter)

    with contextlib.ExitStack() as hooks:
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(on_gradient).remove)
        yield num_seen


class Reduction:
    """One reduction of a list of gradients; its buckets start in order."""

    def __init__(self, parameters: Parameters, state: HookState, bucket_cap_mb: float) -> None:
        listed = options.listed("rota.reduce_gradients", parameters)
        unique = {id(p): p for p in listed if p.requires_grad}
        self._parameters = list(unique.values())
        self._positions = {identity: i for i, identity in enumerate(unique)}
        self._state = state
        plan = _plan_of(self._parameters, state, bucket_cap_mb)
        self._buckets, self._digest = plan.buckets, plan.digest
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        state.note_frozen(p for p in listed if not p.requires_grad)

    @property
    def has_started(self) -> bool:
        return len(self._futures) > 0

    @contextlib.contextmanager
    def on_gradients(self, num_backwards: int) -> Iterator[None]:
        bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters()}
        num_awaited = Counter({bucket: len(bucket.parameters()) for bucket in self._buckets})

        def on_complete(parameter: torch.Tensor) -> None:
            num_awaited[bucket_of[id(parameter)]] -= 1
            with telling_peers(self._state):
                while not self._all_started and num_awaited[self._next_bucket] == 0:
                    self._start()

        def describe(parameter: torch.Tensor) -> str:
            return f"rota.overlap_gradients: the gradient of {self._name(parameter)}"

        with each_complete(
            self._parameters, num_backwards, on_complete, describe, "in the context"
        ):
            yield

    def start(self) -> None:
        """Starts the buckets that have not started, and waits for none."""
        if not self._buckets:
            self._state.begin()
        while not self._all_started:
            self._start()

    def finish(self) -> None:
        self.start()
        has_gradient = [p.grad is not None for p in self._parameters]
        # With the digest's bits and their inverses: where lists differ, some bit has both.
        digest = int.from_bytes(self._digest, "little")
        bits = [bool(digest >> i & 1) for i in range(8 * len(self._digest))]
        flags = torch.tensor(
            [*has_gradient, *bits, *(not bit for bit in bits)], dtype=torch.bool, device="cpu"
        )
        for future in self._futures:
            future.wait()
        self._state.communicator.all_reduce(flags, "max")
        *is_used, own, inverse = flags.split([*[1] * len(has_gradient), len(bits), len(bits)])
        if (own & inverse).any():
            raise self._lists_differ()
        wanted = {id(p) for p, used in zip(self._parameters, is_used, strict=True) if used}
        if not self._state.is_sharded:
            for bucket in self._buckets:
                bucket.unpack(wanted)
        self._state.end(wanted)

    def _lists_differ(self) -> Mismatch:
        communicator = self._state.communicator
        rank, world_size = communicator.rank, communicator.world_size
        own = torch.frombuffer(bytearray(self._digest), dtype=torch.uint8)
        digests = torch.empty(world_size, len(own), dtype=torch.uint8, device="cpu")
        communicator.all_gather(digests, own)
        lists = sides([f"list {bytes(digest.tolist()).hex()[:8]}" for digest in digests], "has")
        return Mismatch(
            f"rota.reduce_gradients: rank {rank}/{world_size}: the ranks' lists of parameters "
            f"differ in names, shapes or order: {lists}; no gradient was written: pass the same "
            f"list on every rank"
        )

    @property
    def _all_started(self) -> bool:
        return len(self._futures) == len(self._buckets)

    @property
    def _next_bucket(self) -> PackedBucket:
        return self._buckets[len(self._futures)]

    def _start(self) -> None:
        bucket = self._next_bucket
        for parameter in bucket.parameters():
            check_gradient(parameter, self._name(parameter))
        if not self.has_started:
            self._state.begin()
        bucket.pack()
        self._futures.append(self._state.start(bucket, may_have_unused=False))

    def _name(self, parameter: torch.Tensor) -> str:
        return self._state.name_of(parameter, f"{self._positions[id(parameter)]} of the list")


def free_buckets(state: HookState) -> None:
    """Frees the memory of a state's buckets; its next reduction makes new ones."""
    _plans.pop(state, None)
    state.free_buckets()


def _plan_of(parameters: list[torch.Tensor], state: HookState, bucket_cap_mb: float) -> Plan:
    if not isinstance(state, HookState):
        raise TypeError(
            f"rota.reduce_gradients: its state is of type {type(state).__name__}; call it as "
            f"rota.reduce_gradients(model.parameters(), rota.HookState(...))"
        )
    if not bucket_cap_mb > 0:
        raise ValueError(
            f"rota.reduce_gradients: bucket_cap_mb is {bucket_cap_mb}, expected more than 0"
        )
    bucket_cap_bytes = int(bucket_cap_mb * 2**20)
    plan = _plans.get(state)
    if plan is None or not plan.fits(parameters, bucket_cap_bytes):

        def name_of(i: int) -> str:
            return state.name_of(parameters[i], f"{i} of the list")

        ranks = dist.get_process_group_ranks(state.group)
        check_same_shards("reduce_gradients", parameters, name_of, ranks)
        state.replace_parameters(parameters)
        plan = _plans[state] = Plan(parameters, bucket_cap_bytes, state)
    return plan
