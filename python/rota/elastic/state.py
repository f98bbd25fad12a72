"""The training state that all ranks have alike, and how a rank gets it from another's memory."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rota.elastic.arena import Arena, lies_on, put_on, take_from
from rota.elastic.generation import Generation, check_results, shares_host
from rota.elastic.parts import ModulePart, Storages, part_of, refusing_unpicklable
from rota.elastic.reservation import LAYOUT, Reservation
from rota.errors import Mismatch, TransportError
from rota.rendezvous.alike import check_alike
from rota.rendezvous.joint import run_on_all
from rota.shared.aligned import AlignedLayout
from rota.shared.apart import pickle_without, unpickle_with

# Shorter tensors that a state_dict() makes anew are pickled if they are on a GPU, or more than
# plain numbers.
_LONG_BYTES = 64 << 10
# For a handshake between two processes that both wait for it.
_COPY_TIMEOUT = timedelta(minutes=5)
_NAME = "rota.elastic.State"
_FRESH = -1  # instead of a number of steps: the state comes from no training


@dataclass(frozen=True)
class _Offer:
    """What the source tells: where its tensors lie, and all the rest."""

    num_steps: int
    kept: tuple[str, list[int]]  # address and lengths of an arena
    # Of another one, its address and the dtypes and shapes of its tensors.
    loose: tuple[str, list[tuple[torch.dtype, torch.Size]]]
    states: dict[str, bytes]  # by object, with KeptTensors and numbers for what is in the arenas


class State:
    """Objects whose state is the same on all ranks, or may be taken from any of them.

    `commit` ends a step. After a failure `synchronize` takes each rank back to its last commit:
    gradients are dropped, and all but parameters and optimiser state is restored. Each commit
    copies that, however long it is. Parameters and optimiser state must not change between the
    first collective of a step and its optimizer.step(). A rank that joins, has missed a step, or
    has changed them after its last commit copies the state, with a checksum, from the memory of a
    rank that lives; it warns once if all have changed theirs. (Commits as in Horovod Elastic;
    healing from a living peer as in torchft.)

    For that, `commit` moves the storages of parameters and optimiser state to memory that the
    processes of the host can read, as torch.Tensor.share_memory_ does; raw pointers and numpy
    arrays of them then refer to old memory. Tensors that cannot move, such as those on a GPU, are
    copied there for each transfer (not yet run on a GPU).

    Args:
        objects: modules, optimisers, and whatever else has state_dict() and load_state_dict(), by
            the same names on all ranks. The module, not DistributedDataParallel around it, which is
            made anew in every generation (with init_sync=False, since the ranks are equal).

    Attributes:
        seconds: what the last synchronize() took, by term. For benchmarks.

    Raises:
        TypeError: an object has no state, or is a DistributedDataParallel.

    Example:
        >>> state = rota.elastic.State(model=model, optimizer=optimizer, shards=shards)
        >>> state.synchronize(generation)
        >>> ...  # a step: forward, backward, all-reduce, optimizer.step()
        >>> state.commit()
    """

    def __init__(self, **objects: object) -> None:
        for name, target in objects.items():
            if isinstance(target, torch.nn.parallel.DistributedDataParallel):
                raise TypeError(
                    f"rota.elastic.State: {name} is a DistributedDataParallel, which lasts for one "
                    f"generation; pass the module inside"
                )
        # Modules first: their storages then have the same numbers on all ranks, also where an
        # optimiser has no state yet.
        self._parts = sorted(
            (part_of(name, target) for name, target in objects.items()),
            key=lambda part: not isinstance(part, ModulePart),
        )
        for target in objects.values():
            if isinstance(target, torch.optim.Optimizer):
                # A step cannot be taken back: parameters on a GPU have no other copy.
                target.register_step_pre_hook(lambda *_: check_results())
        self._num_steps = _FRESH
        self.seconds: dict[str, float] = {}
        self._kept: Arena | None = None
        self._loose: Arena | None = None
        self._spare: Arena | None = None
        self._generation: Generation | None = None
        self._copied: set[int] = set()  # storages that cannot move to the arena
        self._may_be_new = True  # tensors that are not in the arena
        self._num_changes: int | None = None  # of parameters until the last commit
        self._has_warned = False

    @property
    def num_steps(self) -> int:
        """Steps that were committed. Set it after loading a checkpoint; 0 before any."""
        return max(self._num_steps, 0)

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        if not isinstance(num_steps, int) or num_steps < 0:
            raise ValueError(
                f"rota.elastic.State: num_steps is {num_steps!r}, expected an int from 0 on"
            )
        self._num_steps = num_steps
        self._save()

    def take(self, reservation: Reservation) -> bool:
        """Uses reserved memory for the first copy. Blocks until all of it is there, so call it
        before `Membership.next`, after which others would wait.

        Returns:
            Whether the job has a state to copy.

        Raises:
            rota.TransportError: there is too little memory.
        """
        self._spare = reservation.arena()
        return self._spare is not None

    def commit(self) -> None:
        """Ends a step, right after optimizer.step(). Does not wait for other ranks.

        On a GPU, this and the step() of an optimizer in the state wait for the collectives that are
        queued, and raise if one has failed. The first one in a generation copies what is new to
        memory that peers can read.

        Raises:
            TypeError: an object's state cannot be pickled.
            rota.PeerFailed, rota.Timeout, rota.Mismatch: a collective has failed on a GPU.
        """
        check_results()
        self._num_steps = self.num_steps + 1
        if self._may_be_new:
            self._share()
            self._may_be_new = False
            self._tell_newcomers()
        self._save()

    def synchronize(self, generation: Generation, *, check_equal: bool = False) -> bool:
        """Gives all ranks the state of the one that has ended most steps; of several, the lowest.

        Collective, on all ranks of the generation, before anything else in it. Blocks until all are
        done. A rank keeps its state until the one that it gets is complete and verified, so it
        needs memory for both.

        Args:
            check_equal: also compare parameters and optimiser state of ranks that need not copy
                any; reads them once.

        Returns:
            Whether this rank has got its state from another.

        Raises:
            rota.Mismatch: ranks have other objects, models or numbers of logical shards, or, with
                check_equal, other numbers after the same step; on every rank, with what each has.
            TypeError: the state of an object here cannot be pickled; the others raise
                rota.TransportError, which names the rank.
            rota.TransportError: a copy differs from its source, or a rank could not take part; on
                every rank.
            rota.PeerFailed: a rank has died.

        After an error, ranks keep their states.
        """
        timer = _Timer(self)
        self._generation = generation
        self.seconds = {}
        own = {f"'{part.name}'": part.describe() for part in self._parts}

        def describe() -> tuple[int, bool, dict[str, str]]:
            # Whether parameters were written to since the last commit.
            has_changed = self._num_changes not in (None, self._count_changes())
            return self._num_steps, has_changed, own

        cards = run_on_all(_NAME, describe)
        check_alike(
            _NAME,
            [descriptions for *_, descriptions in cards],
            "start every rank with the same program and arguments",
        )
        # The most steps; of these, parameters that are as they were committed.
        ranking = [(num_steps, not has_changed) for num_steps, has_changed, _ in cards]
        best = max(ranking)
        source = ranking.index(best)
        is_all_fresh, is_as_committed = best[0] == _FRESH, best[1]
        receivers = {
            rank
            for rank, of_rank in enumerate(ranking)
            if rank != source and (is_all_fresh or not is_as_committed or of_rank < best)
        }
        if not is_as_committed:
            self._warn_of_changes(source)
        for part in self._parts:
            part.roll_back()
        timer.end("compare")
        if receivers or check_equal:
            self._transfer(generation, timer, source, receivers, check_equal)
        if generation.rank not in receivers:
            self._num_steps = self.num_steps
        for part in self._parts:
            part.regroup()
        self._may_be_new = True
        self._tell_newcomers()
        run_on_all(_NAME, self._save)
        timer.end("regroup")
        return generation.rank in receivers

    # ---- the transfer

    def _transfer(
        self,
        generation: Generation,
        timer: _Timer,
        source: int,
        receivers: set[int],
        check_equal: bool,
    ) -> None:
        rank = generation.rank
        offer = run_on_all(_NAME, lambda: self._offer() if rank == source else None)[source]
        assert offer is not None
        timer.end("offer")
        copies: list[Arena] = []

        def copy_or_sum() -> list[int]:
            if rank in receivers:
                (address, lengths), (loose_address, forms) = offer.kept, offer.loose
                copies.extend((self._arena_of(lengths), Arena([_layout(forms).end])))
                timer.end("allocate")
                if shares_host(generation, source):
                    sums = [
                        arena.fetch(place, f"rank {source}", _COPY_TIMEOUT)
                        for arena, place in zip(copies, (address, loose_address), strict=True)
                    ]
                else:
                    sums = [arena.receive(source) for arena in copies]
                timer.end("copy")
                return sums
            if rank == source:
                arenas = [arena for arena in (self._kept, self._loose) if arena is not None]
                for receiver in sorted(receivers):
                    if not shares_host(generation, receiver):
                        for arena in arenas:
                            dist.send(arena.bytes, receiver)
                return [arena.checksum() for arena in arenas]
            if check_equal:
                self._share()
                return [self._kept.checksum()] if self._kept else []
            return []

        sums = run_on_all(_NAME, copy_or_sum)
        _check_sums(sums, source, receivers, offer.num_steps)
        timer.end("verify")
        run_on_all(_NAME, lambda: self._load(offer, *copies) if copies else None)
        timer.end("load")
        for arena in copies:
            arena.unmap_source()
        self._loose = None

    def _arena_of(self, lengths: list[int]) -> Arena:
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.lengths == lengths else Arena(lengths)

    def _offer(self) -> _Offer:
        states = self._share()
        loose: list[torch.Tensor] = []

        def loosen(tensor: torch.Tensor) -> int | None:
            if not _is_loose(tensor):
                return None
            loose.append(tensor.detach())
            return len(loose) - 1

        pickled = {}
        for name, state in states.items():
            with refusing_unpicklable(name):
                pickled[name] = pickle_without(state, loosen)
        forms = [(tensor.dtype, tensor.size()) for tensor in loose]
        layout = _layout(forms)
        self._loose = Arena([layout.end])
        for number, place in layout.views(self._loose.bytes).items():
            place.copy_(loose[number])
        assert self._kept is not None
        return _Offer(
            self.num_steps,
            (self._kept.address, self._kept.lengths),
            (self._loose.address, forms),
            pickled,
        )

    def _share(self) -> dict[str, Any]:
        """Moves what is kept to the arena; returns the states of all objects without it."""
        kept = Storages()
        states = {part.name: part.save(kept) for part in self._parts}
        lengths = [tensor.untyped_storage().nbytes() for tensor in kept.tensors]
        arena = self._kept
        if arena is None or arena.lengths != lengths or self._has_moved(kept, arena):
            arena = self._kept = Arena(lengths)
        self._copied = set()
        for number, (tensor, place) in enumerate(zip(kept.tensors, arena.places(), strict=True)):
            if not put_on(tensor, place):
                self._copied.add(number)
        return states

    def _tell_newcomers(self) -> None:
        generation, kept = self._generation, self._kept
        if generation is not None and generation.rank == 0 and kept is not None:
            generation.write_note(LAYOUT, json.dumps([kept.lengths, kept.address]))

    def _has_moved(self, kept: Storages, arena: Arena) -> bool:
        """Whether a storage is outside the arena that could be moved there."""
        return any(
            number not in self._copied and not lies_on(tensor, place)
            for number, (tensor, place) in enumerate(zip(kept.tensors, arena.places(), strict=True))
        )

    def _load(self, offer: _Offer, kept: Arena, loose: Arena) -> None:
        self._num_steps = _FRESH  # until all of it is there
        places, loose_tensors = kept.places(), _layout(offer.loose[1]).views(loose.bytes)
        storages: dict[int, torch.Tensor] = {}

        def storage_on(number: int, num_bytes: int) -> torch.UntypedStorage:
            if number not in storages:
                storages[number] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                take_from(storages[number], places[number])
            return storages[number].untyped_storage()

        states = {
            name: unpickle_with(state, lambda number: loose_tensors[number].clone())
            for name, state in offer.states.items()
        }
        own = Storages()
        layouts = {
            part: (part.layout(own), states[part.name][0])
            for part in self._parts
            if isinstance(part, ModulePart)
        }
        if all(here == there for here, there in layouts.values()):
            for tensor, place in zip(own.tensors, places, strict=False):
                take_from(tensor, place)
        else:
            for module, (_, there) in layouts.items():
                module.copy_parameters(there, storage_on)
        for part in self._parts:
            part.load(states[part.name], storage_on)
        self._kept = kept
        self._copied = set()
        self._num_steps = offer.num_steps

    # ---- what a failed step has changed

    def _save(self) -> None:
        for part in self._parts:
            part.remember()
        self._num_changes = self._count_changes()

    def _count_changes(self) -> int:
        return sum(part.num_changes() for part in self._parts)

    def _warn_of_changes(self, source: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rota.elastic.State: parameters have changed on all ranks since step "
                f"{self.num_steps} was committed, and cannot be rolled back; all ranks take those "
                f"of rank {source}; call commit() right after optimizer.step()",
                stacklevel=3,
            )


class RandomState:
    """The random state of torch's CPU generator and of Python, for `State`: the same on all ranks.

    Reseed by rank after synchronize() where ranks must differ, or use rota.LogicalShards.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])


def _layout(forms: Sequence[tuple[torch.dtype, torch.Size]]) -> AlignedLayout[int]:
    return AlignedLayout(dict(enumerate(forms)))


def _is_loose(tensor: torch.Tensor) -> bool:
    """Whether it goes through memory. Pickling takes 0.2 ms a tensor, on every rank."""
    if tensor.layout != torch.strided:
        return False
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.is_quantized
    return is_plain or tensor.nbytes >= _LONG_BYTES


class _Timer:
    """Writes the seconds of each term to the state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._last = time.monotonic()

    def end(self, term: str) -> None:
        now = time.monotonic()
        self._state.seconds[term] = now - self._last
        self._last = now


def _check_sums(
    sums: Sequence[list[int]], source: int, receivers: set[int], num_steps: int
) -> None:
    """Copies are equal to their source, and so are the others that were asked."""
    texts = [f"rank {rank} {of_rank[0]:016x}" for rank, of_rank in enumerate(sums) if of_rank]
    wrong = [str(rank) for rank in sorted(receivers) if sums[rank] != sums[source]]
    if wrong:
        raise TransportError(
            f"rota.elastic.State: what rank {', '.join(wrong)} has copied differs from what rank "
            f"{source} has: checksums {', '.join(texts)}; is its memory damaged, or does another "
            f"thread train on?"
        )
    if any(of_rank and of_rank[0] != sums[source][0] for of_rank in sums):
        raise Mismatch(
            f"rota.elastic.State: after step {num_steps} parameters and optimiser state differ: "
            f"checksums {', '.join(texts)}; go on from a checkpoint, and find out why the ranks "
            f"have drifted apart"
        )
