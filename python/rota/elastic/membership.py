"""Processes that train together, come and go: who they are, and one generation after the other."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from rota import timeouts
from rota.backend import BackendOptions
from rota.communicator import Communicator
from rota.elastic.forming import Forming
from rota.elastic.generation import Generation
from rota.elastic.roster import Roster
from rota.errors import PeerFailed, RotaError
from rota.rendezvous.documents import Documents
from rota.rendezvous.polling import NamedPauses
from rota.shared.liveness import Handle, OwnProcess, Processes, own_ip

_ROSTER = "roster"
_JOB = "job"


class Finished(RotaError):
    """The job is over: a member has called `Membership.finish`."""


class Membership:
    """This process's part in a job whose processes come and go.

    `next` makes the members agree on a generation: who takes part, with which ranks. Survivors keep
    their order, and newcomers follow. No timeout decides who is lost: the kernel reports the end of
    a process. (From torch elastic's rendezvous, torchft, and c10d's reconfigure: docs/elastic.md.)

    Making one does not wait. One process has one membership at a time.

    Args:
        store: in which all processes of the job meet; it must outlive each of them, as a TCPStore
            does whose server is in none, and supports compare_set. Used for nothing else.
        rank: a number to order ranks by: those that give one come before those that do not. The
            ranks themselves are always 0, 1, 2 and so on.
        timeout: of waits for members that live, and of the groups'; None: torch's default, 30
            minutes.
        pg_options: of the default groups.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> membership = rota.elastic.Membership(dist.TCPStore(host, port))
        >>> while step < num_steps:
        ...     generation = membership.next()
        ...     try:
        ...         state.synchronize(generation)
        ...         ddp = DistributedDataParallel(model)
        ...         while step < num_steps and not generation.is_over():
        ...             step = train_step(ddp, step)
        ...     except rota.PeerFailed:
        ...         pass  # the others go on
        >>> membership.finish()
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int | None = None,
        timeout: timedelta | None = None,
        pg_options: BackendOptions | None = None,
    ) -> None:
        if rank is not None and (not isinstance(rank, int) or rank < 0):
            raise ValueError(
                f"rota.elastic.Membership: rank is {rank!r}, expected None or an int from 0"
            )
        self._ip = own_ip(store)
        self._store = dist.PrefixStore("rota/elastic", store)
        self._documents = Documents(self._store)
        self._rank = rank
        self._timeout = timeouts.checked(
            timeout, "rota.elastic.Membership", dist.default_pg_timeout
        )
        self._pg_options = pg_options
        job = self._documents.change(_JOB, lambda job: job.setdefault("id", uuid.uuid4().hex))
        self._job: str = job["id"]
        self._cards: dict[str, Handle] = {}
        self._left: set[str] = set()  # names in it that were no members of the last generation
        self._generation: Generation | None = None
        self._number = 0  # of the last one
        self._uuids: list[str] = []  # of the last one and of attempts since the one before
        # Whether the process was in the last generation; it keeps its place if an attempt fails.
        self._was_member = False
        self._start()

    @property
    def handle(self) -> str:
        """This process, for `reconfigure` on any member."""
        return str(self._own.handle)

    @property
    def generation(self) -> Generation | None:
        """The present one; None before the first, and after its end."""
        return self._generation

    def next(self, min_members: int = 1) -> Generation:
        """Ends the present generation and goes on in the next one, with all that have come.

        Blocks until every member of the present one has called it, left or died, and all that take
        part are connected. If a member is lost meanwhile, the others try again. Call it at the
        start, after `Generation.is_over`, and after rota.PeerFailed.

        Args:
            min_members: how many must have come before any goes on; the smallest of theirs counts.

        Raises:
            rota.elastic.Finished: the job is over.
            ValueError: several members ask for the same rank; raised by all. Or min_members is
                no number from 1.
            rota.TransportError: a member could not connect, for want of memory for example; raised
                by all, which may call it again.
            rota.Timeout: a living member did not come in time.
            rota.RotaError: torch.distributed is initialised, or this process has left.
        """
        if not isinstance(min_members, int) or min_members < 1:
            raise ValueError(
                f"rota.elastic: min_members is {min_members!r}, expected an int from 1 on"
            )
        ended_s = self._end_present()
        while True:
            began = time.monotonic()
            try:
                roster = self._await_proposal(min_members)
                handles = [self._card(name) for name in roster.members]
                waited_s = time.monotonic() - began
                self._check_clashes(roster)
                self._uuids.append(roster.uuid)
                generation = self._form(roster.number, roster.uuid, handles)
            except PeerFailed:
                continue
            except BaseException:
                self._withdraw()
                raise
            generation.seconds = {"end": ended_s, "wait": waited_s, **generation.seconds}
            self._tidy(generation)
            return generation

    def reconfigure(self, uuid: str, handles: Sequence[str]) -> Generation:
        """As `next`, with members that the callers agree on by themselves, like torch 2.15's
        reconfigure.

        Every member calls it with the same arguments. Either all return the generation, or all
        raise the same kind of error, after which another uuid can be tried.

        Args:
            uuid: of the generation; one that was never used in this store.
            handles: of the members (`handle`), in the order of their ranks.

        Raises:
            ValueError: the uuid was used before; or a member was given a handle of another job,
                one twice, or none of its own, which all say.
            rota.Mismatch: members were given different handles; says which.
            rota.PeerFailed: a member has died or left.
        """
        ended_s = self._end_present()
        generation = self._form(self._number + 1, uuid, handles)
        generation.seconds = {"end": ended_s, **generation.seconds}
        return generation

    def leave(self) -> None:
        """Ends this process's part; the others go on without it. Does not wait. Idempotent.

        Members that wait for it in a collective raise rota.PeerFailed, unless all have agreed by
        `Generation.is_over(leave=True)`. `next` comes back as a newcomer.
        """
        self._end_present("has left")
        self._withdraw(even_as_member=True)
        self._own.close()
        self._was_member = False

    def finish(self) -> None:
        """Leaves, because the work is done: members that have not come yet raise `Finished`."""
        self._change(Roster.finish)
        self.leave()

    def read_note(self, key: str) -> str | None:
        """What a member has left for newcomers with `Generation.write_note`; None: nothing."""
        note = f"note/{key}"
        return str(self._store.get(note).decode()) if self._store.check([note]) else None

    # ---- the roster

    def _start(self) -> None:
        self._own = OwnProcess(self._job, self._ip)
        self._processes = Processes(self._own.handle)
        self._store.set(f"card/{self._own.handle.name}", str(self._own.handle))

    def _await_proposal(self, min_members: int) -> Roster:
        """Arrives, and blocks until there is a proposal with this process."""
        if self._own.is_closed:
            self._start()
        own = self._own.handle.name
        roster = self._change(partial(Roster.arrive, name=own, rank=self._rank))
        uuid_before = roster.uuid
        rung = ""
        pauses = NamedPauses(f"rota.elastic: {self._own.handle.who}", self._timeout)
        while True:
            if roster.uuid != uuid_before and own in roster.members:
                return roster
            if roster.is_finished:
                raise Finished("rota.elastic: the job is over, a member has called finish()")
            if own not in roster.arrived:
                raise RotaError(
                    f"rota.elastic: {self._own.handle.who} counts as gone among the others; call "
                    f"leave(), and next() again"
                )
            if roster.uuid and roster.uuid != rung:
                rung = roster.uuid
                self._store.set(f"change/{rung}", own)
            present = self._cards_of(roster.present)
            gone = self._processes.gone(present or ())
            if gone:
                names = {handle.name for handle in gone}
                roster = self._change(partial(Roster.remove, names=names))
            elif present is not None and roster.can_propose(min_members):
                roster = self._change(partial(_propose, min_members=min_members))
            else:
                awaited = self._cards_of(roster.awaited) or ()
                pauses.sleep([handle.who for handle in awaited])
                roster = Roster.of(self._documents.read(_ROSTER))

    def _withdraw(self, even_as_member: bool = False) -> None:
        """Takes this process out, unless it has a place that the others must wait for."""
        if even_as_member or not self._was_member:
            self._change(partial(Roster.remove, names=[self._own.handle.name]))

    def _change(self, change: Callable[[Roster], None]) -> Roster:
        def apply(document: dict[str, Any]) -> None:
            roster = Roster.of(document)
            change(roster)
            roster.write(document)

        return Roster.of(self._documents.change(_ROSTER, apply))

    def _card(self, name: str) -> Handle:
        if name not in self._cards:
            self._cards[name] = Handle.parse(self._store.get(f"card/{name}").decode())
        return self._cards[name]

    def _cards_of(self, names: Sequence[str]) -> list[Handle] | None:
        """Their handles; None if the others have forgotten one of them since."""
        unknown = [f"card/{name}" for name in names if name not in self._cards]
        if unknown and not self._store.check(unknown):
            return None
        return [self._card(name) for name in names]

    def _check_clashes(self, roster: Roster) -> None:
        if not roster.clashes:
            return
        texts = (
            f"rank {rank} is asked for by {' and '.join(self._card(name).who for name in names)}"
            for rank, names in roster.clashes
        )
        raise ValueError(
            f"rota.elastic: {'; '.join(texts)}; give each process its own rank, or none"
        )

    def _tidy(self, generation: Generation) -> None:
        """Forgets earlier generations; of the store, rank 0 deletes what they have left there."""
        *old_uuids, _ = self._uuids
        self._uuids = [generation.uuid]
        # The rest may come back under their names. To ask for a process that is just ending takes
        # as long as its end, so who has left is asked for after the next generation.
        members = {Handle.parse(handle).name for handle in generation.handles}
        others = self._cards.keys() - members
        self._processes.gone(self._cards[name] for name in others & self._left)
        # A member that has died since is still asked for, by its card.
        gone = self._processes.take_gone(kept=members)
        self._left = others - gone
        self._cards = {name: card for name, card in self._cards.items() if name not in gone}
        old = {*old_uuids, *gone}
        if generation.rank != 0 or not old:
            return
        with contextlib.suppress(AttributeError, NotImplementedError):  # torch 2.11 lists no keys
            for key in self._store.list_keys():
                if not old.isdisjoint(key.split("/")):
                    self._store.delete_key(key)

    # ---- a generation

    def _form(self, number: int, uuid: str, handles: Sequence[Handle | str]) -> Generation:
        if dist.is_initialized():
            raise RotaError(
                "rota.elastic: torch.distributed is initialised; a membership makes the default "
                "group itself, call dist.destroy_process_group() before"
            )
        began = time.monotonic()
        own, processes = self._own.handle, self._processes
        forming = Forming(self._documents, own, processes, uuid, handles, self._timeout)
        forming.agree()
        agreed = time.monotonic()
        members = forming.handles
        generation = Generation(self._store, processes, number, uuid, members, members.index(own))
        with generation.forming(forming):
            dist.init_process_group(
                "rota",
                store=dist.PrefixStore(f"groups/{uuid}", self._store),
                rank=generation.rank,
                world_size=generation.world_size,
                timeout=self._timeout,
                pg_options=self._pg_options,
            )
            generation.communicator = Communicator(timeout=self._timeout)
        processes.keep_only(members)
        self._own.tidy()
        generation.seconds = {"agree": agreed - began, "connect": time.monotonic() - agreed}
        self._generation = generation
        self._number = number
        self._was_member = True
        return generation

    def _end_present(self, how: str = "has gone on to the next one") -> float:
        """Ends the present generation; returns the seconds it took."""
        began = time.monotonic()
        if self._generation is not None:
            self._generation.end(f"rank {self._generation.rank}, {self._own.handle.who}, {how}")
            self._generation = None
        return time.monotonic() - began


def _propose(roster: Roster, min_members: int) -> None:
    # Another process may have been faster.
    if roster.can_propose(min_members) and not roster.is_finished:
        roster.propose(uuid.uuid4().hex)
