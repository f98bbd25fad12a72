"""The loop of a server: waits for pushes, has its shards updated, and sees who is gone.

The only place where a server waits. It never waits for one worker alone: it looks at all of them
whenever any has rung, and at least every LOOK_EVERY.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple

import torch

from rota import _C
from rota.errors import PeerFailed, Timeout
from rota.parameter_server.mailbox import OpenedMailbox
from rota.parameter_server.shard import ServerShard, ShardMemory
from rota.shared.double_buffer import OpenedDoubleBuffer

PUSH_CHANNEL = 0
# How long the clock of a worker that was killed may hold the others up.
LOOK_EVERY = timedelta(milliseconds=20)


class Ward(NamedTuple):
    """A shard that this server goes on with if the shard's server dies."""

    published: OpenedDoubleBuffer[torch.Tensor]  # by its server
    memory: ShardMemory  # where this server would
    take_over: Callable[[], ServerShard]


class ServerLoop:
    """The loop, which runs once, here or in a thread of its own. Mailboxes are by rank."""

    def __init__(
        self,
        window: _C.Window,
        mailboxes: Mapping[int, OpenedMailbox],
        shards: Sequence[ServerShard],
        wards: Sequence[Ward],
    ) -> None:
        self._window = window
        self._mailboxes = mailboxes
        self._shards = list(shards)
        self._wards = list(wards)
        self._next_look = 0.0
        self._living = set(mailboxes)
        self._is_stopping = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None  # that ended the thread

    def run(self) -> None:
        """Serves until every worker has left or died and all their pushes are applied. Blocks.

        Raises what an optimizer raises; workers then see that the server has ended.
        """
        try:
            self._serve()
        finally:
            for shard in self._shards:
                shard.close()
            for ward in self._wards:
                ward.memory.exposed.close()

    def _serve(self) -> None:
        while not self._is_stopping:
            self._look()
            if any([shard.advance(self._living) for shard in self._shards]):
                continue
            if self._drop(worker for worker in self._living if self._mailboxes[worker].has_left):
                continue  # pushes that were made before leaving are visible now
            if not self._living:
                return
            with contextlib.suppress(Timeout, PeerFailed):
                self._window.wait_any_signal(sorted(self._living), PUSH_CHANNEL, LOOK_EVERY)

    def _look(self) -> None:
        """Drops workers that have died, takes over the shards of servers that have, and does what
        has been asked for."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY.total_seconds()
        mailboxes = {worker: self._mailboxes[worker] for worker in self._living}
        self._drop(w for w, box in mailboxes.items() if box.has_left or not box.opened.is_open)
        lost = [ward for ward in self._wards if self._living and not ward.published.opened.is_open]
        for ward in lost:
            self._wards.remove(ward)
            self._shards.append(ward.take_over())
        while not self._calls.empty():
            call, done = self._calls.get()
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
        for shard in self._shards:
            for worker in self._living:
                shard.answer(worker)

    def _drop(self, workers: Iterable[int]) -> bool:
        gone = set(workers)
        self._living = self._living - gone  # another thread may be reading the set
        if gone:
            for shard in self._shards:
                shard.publish_slowest(self._living)
                for worker in gone:
                    shard.forget(worker)
        return bool(gone)

    def replace(self, old: ServerShard, new: ServerShard, timeout: timedelta) -> None:
        """Goes on with another shard, once that is published; TimeoutError: the loop has ended."""

        def run() -> None:
            self._shards[self._shards.index(old)] = new
            new.start()

        if self._thread is None:
            return run()
        done: Future[None] = Future()
        self._calls.put((run, done))
        return done.result(timeout.total_seconds())

    # ---- in the background

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rota-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error

    def join(self, timeout: timedelta) -> bool:
        assert self._thread is not None
        self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the loop within about LOOK_EVERY, whatever is left to do."""
        self._is_stopping = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    @property
    def awaited(self) -> list[int]:
        return sorted(self._living)
