"""rota.checkpoint.Checkpoint: a job's state in memory that outlives its processes."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from rota import timeouts
from rota.checkpoint import disk
from rota.checkpoint.contents import WHAT, Contents, match
from rota.checkpoint.holdings import Holdings
from rota.checkpoint.link import KeeperLink, KeeperLost
from rota.checkpoint.replicas import Exchange, replica_holders
from rota.checkpoint.session import RankClaim, Session, Sessions, token_of
from rota.checkpoint.version import Identity, Version, write_version
from rota.engine import engine_chooser
from rota.errors import Mismatch, RotaError, TransportError
from rota.rendezvous.groups import end_watch
from rota.shared.apart import unpickle_with

DEFAULT_LINGER = timedelta(minutes=5)
T = TypeVar("T")


class Checkpoint:
    """Versions of each rank's state in memory that survives the ranks, and on another host.

    `save` copies this rank's state to shared memory of a keeper, a small process per host that no
    launcher kills, and to the next host if there are several. After a failure, ranks that start
    again `load` the newest version that all ranks have: two are kept in turn, so one is whole
    whenever a process is killed. docs/checkpoint.md says what is promised, and when keepers end.
    (As GEMINI does, Wang et al., SOSP 2023, and the local checkpoints of NVIDIA's Resiliency
    Extension.)

    save(), load() and load_from_disk() are collective: every rank calls them in the same order. If
    one fails on a rank, it raises on all; once a rank has started again, all call load(). One
    thread at a time may use a Checkpoint.

    A `with` block closes it, with keep=True if an exception leaves the block.

    Args:
        store_or_group: a torch Store that outlives all ranks, or a process group, whose store,
            ranks and timeout are used.
        name: of the state; a job may have several.
        rank, world_size: of this process; they follow from a group.
        job: tells this job from others on the host, equal whenever it starts again. None:
            TORCHELASTIC_RUN_ID, unless torchrun has set it to "none"; otherwise a name that is
            kept in the store, which must then survive the job's restarts.
        linger: how long the keeper waits for new ranks when all have ended without close().
        launcher: pid of a process that may start ranks again; the keeper stays while it runs.
            None: the parent process if that is torchrun.
        replicate: whether to copy versions to another host, if there are several.
        engine: a process group of the same ranks for these copies; None makes a Gloo group.
        timeout: of each call; None is that of the group or the store.

    Raises:
        TypeError, ValueError: arguments that do not fit together.
        rota.Mismatch: another living process has this rank, another job on this host has this
            one's name, or the keeper is that of another version of rota.
        rota.TransportError: no keeper can be started, or it is another user's.

    Example:
        >>> checkpoint = rota.checkpoint.Checkpoint(group, "training")
        >>> found = checkpoint.load()
        >>> if found is not None:
        ...     first_step, state = found
        ...     model.load_state_dict(state["model"])
        >>> for step in range(first_step + 1, num_steps):
        ...     train_step(model)
        ...     checkpoint.save(step, {"model": model.state_dict()})
        >>> checkpoint.close()
    """

    def __init__(
        self,
        store_or_group: dist.Store | dist.ProcessGroup,
        name: str = "checkpoint",
        rank: int | None = None,
        world_size: int | None = None,
        *,
        job: str | None = None,
        linger: timedelta = DEFAULT_LINGER,
        launcher: int | None = None,
        replicate: bool = True,
        engine: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        store, self._rank, self._world_size = _place_of(store_or_group, rank, world_size)
        group = store_or_group if isinstance(store_or_group, dist.ProcessGroup) else None
        self._sessions = Sessions(store, name, None if group is None else end_watch(group))
        default = timeouts.of_store(store) if group is None else timeouts.of_group(group)
        self._timeout = timeouts.checked_positive(timeout, WHAT, default)
        if not isinstance(linger, timedelta):
            raise TypeError(f"{WHAT}: linger is {linger!r}, expected a datetime.timedelta")
        if job is not None and not isinstance(job, str):
            raise TypeError(f"{WHAT}: job is {job!r}, expected a str or None")
        if not isinstance(name, str):
            raise TypeError(f"{WHAT}: name is {name!r}, expected a str")
        if not isinstance(replicate, bool):
            raise TypeError(f"{WHAT}: replicate is {replicate!r}, expected True or False")
        if launcher is None and "TORCHELASTIC_RUN_ID" in os.environ:
            launcher = os.getppid()
        job = _job_name(self._sessions.store, job)
        self._link = KeeperLink(
            f"{job}/{name}",
            token_of(store),
            self._rank,
            linger.total_seconds(),
            launcher,
            self._timeout.total_seconds(),
        )
        self._replicate = replicate
        self._choose_engine = engine_chooser(engine, self._timeout)
        self._writer = disk.Writer()
        # No reference to self, so that a Checkpoint without any leaves its rank at once.
        self._holdings = Holdings(self._link, self._writer.uses)
        self._session: Session | None = None
        self._exchange: Exchange | None = None
        self._holder_of: dict[int, int] = {}
        self._newest: Version | None = None
        self._num_saves = 0  # in this session
        self._is_closed = False
        self._link.connect()
        # While the caller makes its model, so that load() is left with the copy.
        versions = self._holdings.slots(self._rank).versions().values()
        if versions:
            newest = max(versions, key=lambda version: version.identity)
            Thread(target=newest.memory.populate, daemon=True).start()

    @property
    def keeper_pid(self) -> int:
        """The keeper of this host, as of the last call."""
        return self._link.pid

    # ---- save

    def save(self, step: int, state: object) -> None:
        """Copies this rank's state to memory, and to the next host; blocks until all ranks have.

        Each copy takes one pass over the bytes; the first two calls also reserve the memory.

        Args:
            step: at least 0, growing from call to call; the same on all ranks.
            state: nested dicts, lists and tuples of CPU tensors of any dtype and strides, and
                whatever else can be pickled, which should be small. Of a DTensor this rank's part
                is saved.

        Raises:
            TypeError, ValueError: a tensor is elsewhere, a value cannot be pickled, or the step
                does not grow. The others raise rota.TransportError, which names this rank.
            rota.TransportError: memory is short.
            rota.PeerFailed, rota.Timeout: a rank has ended, or not saved in time; names it.
            rota.Mismatch: ranks differ in the step.

        After an error no rank loads this version, and the last one is whole.
        """
        deadline = self._deadline()
        session = self._session
        if session is None:
            session = self._begin("save", {}, deadline)
            self._protect(self._newest_common(session))
        sources = self._sources()

        def exchange(own: Version | None) -> None:
            if self._exchange is not None:
                sends = {self._holder_of[self._rank]: own}
                self._exchange.run(sends, {owner: owner for owner in sources}, self._holdings.room)

        def copy() -> Version:
            self._holdings.ensure_keeper()
            try:
                self._check_step(step)
                identity = Identity(session.number, step, session.token, self._world_size)
                version = write_version(
                    Contents.of(state), identity, self._rank, self._holdings.room
                )
            except Exception:  # raised once the next host knows, also if that has failed
                with contextlib.suppress(RotaError):
                    exchange(None)
                raise
            exchange(version)
            self._holdings.ensure_keeper()
            return version

        version = self._run(session, copy, deadline, step)
        for owner in (self._rank, *sources):
            self._holdings.advance(owner)
        self._newest = version
        self._num_saves += 1
        if self._num_saves == 3:  # all have two versions of this session
            self._holdings.drop_all_but(self._owners_here(session))

    def _check_step(self, step: int) -> None:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"{WHAT}.save: step is {step!r}, expected an int of at least 0")
        if self._newest is not None and step <= (newest := self._newest.identity.step):
            raise ValueError(
                f"{WHAT}.save: step {step} comes after step {newest}; steps must "
                f"grow; nothing was saved; load() an older version to go back"
            )

    # ---- load

    def load(self, into: Any = None) -> tuple[int, Any] | None:
        """Returns the newest version that all ranks have whole; None if there is none. Blocks.

        Every rank gets its own state of the same step, from a replica if this host has lost it.
        Warns if some ranks have versions, but not all the same one.

        Args:
            into: a state with tensors of the same names, shapes and dtypes, which are filled and
                returned; its other values are not looked at. None returns new tensors.

        Returns:
            The step and the state, with plain CPU tensors unless `into` has others.

        Raises:
            TypeError: `into` has a tensor that is not a dense one on the CPU.
            rota.Mismatch: `into` differs from what was saved, on any rank, or another number of
                ranks has saved; nothing was loaded.
            rota.TransportError: a checksum differs: names the rank and the tensor, on all ranks.
                `into` is then partly filled. The next load() takes the replica or the version
                before.
            rota.PeerFailed, rota.Timeout: as save().
        """
        deadline = self._deadline()
        session = self._begin("load", {}, deadline)
        identity = self._newest_common(session)
        self._protect(identity)
        if identity is None:
            self._newest = None
            self._warn_of_parts(session)
            return None

        def find() -> tuple[Version, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
            self._fetch_missing(session, identity)
            version = self._holdings.slots(self._rank).find(identity)
            if version is None:
                raise TransportError(f"{WHAT}.load: step {identity.step} is not there any more")
            return version, *match(version.tail.looks, into)

        version, tensors, originals = self._run(session, find, deadline)

        def copy() -> None:
            damaged = version.copy_to(tensors)
            if damaged is not None:
                version.memory.clear_head()
                raise TransportError(
                    f"{WHAT}.load: {damaged} of rank {self._rank} in step {identity.step} does not "
                    f"match its checksum: its memory is damaged; call load() again for the replica "
                    f"or the version before"
                )

        self._run(session, copy, deadline)
        self._newest = version
        return identity.step, unpickle_with(version.tail.rest, originals.__getitem__)

    # ---- disk

    def save_to_disk(self, directory: str | Path, *, async_op: bool = False) -> Future[Path]:
        """Writes the version that was saved or loaded last. Not collective; each rank calls it.

        Args:
            directory: any number of versions may be in it. Ranks on several hosts need a common
                one only if ranks move between hosts.
            async_op: returns at once and writes in a thread. The version stays as it is until
                then; if training saves twice in the meantime, that takes memory for a third one.

        Returns:
            A future of this rank's folder in it; done unless async_op.

        Raises:
            ValueError: nothing was saved or loaded yet.
            OSError, torch.distributed.checkpoint.CheckpointException: it cannot be written; from
                the future if async_op.
        """
        if self._newest is None:
            raise ValueError(f"{WHAT}.save_to_disk: there is no version; save() one first")
        future = self._writer.start(self._newest, Path(directory))
        if not async_op:
            future.result()
        return future

    def load_from_disk(
        self, directory: str | Path, into: Any = None, *, step: int | None = None
    ) -> tuple[int, Any] | None:
        """Returns the version of the greatest step that all ranks have there. Blocks.

        Args:
            directory: of save_to_disk().
            into: as in load().
            step: this one instead.

        Returns and raises what load() does.
        """
        directory = Path(directory)
        deadline = self._deadline()
        own = disk.identities(directory, self._rank, self._world_size)
        session = self._begin("load_from_disk", {self._rank: own}, deadline)
        whole = [x for x in session.identities() if session.whole(x) and step in (None, x.step)]
        identity = max(whole, key=lambda x: (x.step, x.session), default=None)
        self._protect(None)
        self._newest = None
        if identity is None:
            return None

        def read() -> tuple[bytes, Sequence[torch.Tensor], Sequence[torch.Tensor], Any]:
            tail, tensors = disk.read(directory, identity, self._rank)
            if into is None:
                return tail.rest, tensors, (), tensors
            return tail.rest, tensors, *match(tail.looks, into)

        rest, tensors, targets, originals = self._run(session, read, deadline)
        for target, tensor in zip(targets, tensors, strict=False):
            target.copy_(tensor)
        return identity.step, unpickle_with(rest, originals.__getitem__)

    # ---- end

    def close(self, *, keep: bool = False) -> None:
        """Ends this rank's part; waits for what is written to disk. Idempotent, not collective.

        Args:
            keep: the memory stays for ranks that start again, as after a failure. False: once all
                ranks of the host have closed, it is freed, and the keeper ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.close()
        self._newest = self._session = self._exchange = None
        if not keep:
            with contextlib.suppress(KeeperLost):
                self._link.finish()
        self._link.disconnect()
        self._holdings.forget()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(keep=error is not None)

    # ---- sessions

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout.total_seconds()

    def _begin(self, call: str, on_disk: dict[int, list[Identity]], deadline: float) -> Session:
        if self._is_closed:
            raise RotaError(f"{WHAT}.{call}: it is closed; make a new one")
        self._session = self._exchange = None
        self._num_saves = 0
        self._holdings.ensure_keeper()
        held = on_disk if call == "load_from_disk" else self._holdings.identities()
        claim = RankClaim(self._rank, self._world_size, call, held)
        session = self._sessions.begin(claim, deadline, self._link.left)
        self._holder_of = replica_holders(session.claims) if self._replicate else {}
        if self._holder_of:
            # Gloo's last connection is complete on one rank before it is on the other. Without this
            # step, a rank that finds nothing to load could end while others still connect, and
            # fail them with "Connection closed by peer".
            self._exchange = self._run(session, lambda: self._connect(session), deadline)
        self._session = session
        return session

    def _connect(self, session: Session) -> Exchange:
        store = dist.PrefixStore(f"engine/{session.token}", self._sessions.store)
        engine = self._choose_engine(self._rank, self._world_size).connected(WHAT, store)
        return Exchange(engine, lambda rank: session.claims[rank].who, self._timeout)

    def _run(self, session: Session, part: Callable[[], T], deadline: float, step: int = -1) -> T:
        """Session.run; an error ends the session."""
        try:
            return session.run(part, deadline, step)
        except BaseException as error:
            # Not Ctrl-C in a wait, where this rank has done its part.
            if isinstance(error, Exception) or session.has_told:
                self._session = None
            raise

    # ---- which version

    def _newest_common(self, session: Session) -> Identity | None:
        whole = [identity for identity in session.identities() if session.whole(identity)]
        newest = max(whole, default=None)
        if newest is not None and newest.world_size != self._world_size:
            if session.claims[self._rank].call == "save":
                return None
            raise Mismatch(
                f"{WHAT}.load: step {newest.step} was saved by {newest.world_size} ranks, this job "
                f"has {self._world_size}; start as many, or save() anew"
            )
        if self._exchange is None:  # then nothing comes from another host
            whole = [identity for identity in whole if session.whole(identity, in_place=True)]
        return max(whole, default=None)

    def _protect(self, identity: Identity | None) -> None:
        for owner in (self._rank, *self._sources()):
            self._holdings.slots(owner).protect(identity)

    # The ranks whose replicas this one holds.
    def _sources(self) -> list[int]:
        return [rank for rank, holder in self._holder_of.items() if holder == self._rank]

    # The ranks whose state belongs on this host.
    def _owners_here(self, session: Session) -> set[int]:
        host = session.claims[self._rank].host
        here = {claim.rank for claim in session.claims if claim.host == host}
        return here | {owner for owner, holder in self._holder_of.items() if holder in here}

    def _warn_of_parts(self, session: Session) -> None:
        steps: dict[int, set[int]] = {}
        for claim in session.claims:
            for owner, identities in claim.held.items():
                steps.setdefault(owner, set()).update(identity.step for identity in identities)
        if any(steps.values()):
            have = "; ".join(
                f"rank {rank} has {sorted(steps.get(rank, ())) or 'none'}"
                for rank in range(self._world_size)
            )
            warnings.warn(
                f"{WHAT}.load: there is no step that all ranks have: {have}", stacklevel=3
            )

    # What this host does not have comes from the first rank whose host does.
    def _fetch_missing(self, session: Session, identity: Identity) -> None:
        server_of = {}
        for owner in range(self._world_size):
            readers = [
                claim.rank for claim in session.claims if identity in claim.held.get(owner, ())
            ]
            if owner not in readers:
                server_of[owner] = readers[0]
        if self._exchange is None or not server_of:
            return
        sends = {
            owner: self._holdings.look(owner).find(identity)
            for owner, server in server_of.items()
            if server == self._rank
        }
        sources = {o: server for o, server in server_of.items() if o == self._rank}
        self._exchange.run(sends, sources, self._holdings.room)
        if sources:
            self._holdings.slots(self._rank).protect(identity)


def _place_of(
    store_or_group: dist.Store | dist.ProcessGroup, rank: int | None, world_size: int | None
) -> tuple[dist.Store, int, int]:
    if isinstance(store_or_group, dist.ProcessGroup):
        if rank is not None or world_size is not None:
            raise ValueError(f"{WHAT}: rank and world_size follow from the group; leave them out")
        group = store_or_group
        return group.get_group_store(), group.rank(), group.size()
    if not isinstance(store_or_group, dist.Store):
        raise TypeError(
            f"{WHAT}: store_or_group is {store_or_group!r}, expected a torch.distributed.Store or "
            f"ProcessGroup"
        )
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(
            f"{WHAT}: rank is {rank!r} and world_size {world_size!r}; with a store, expected both, "
            f"and rank from 0 to world_size - 1"
        )
    return store_or_group, rank, world_size


def _job_name(store: dist.Store, job: str | None) -> str:
    if job is not None:
        return job
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job != "none":
        return job
    return str(store.compare_set("job", "", uuid4().hex).decode())
