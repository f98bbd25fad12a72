"""Training through servers that hold the parameters: ParameterServer (Li et al., OSDI 2014).

Every worker has a mailbox of two slots, and every server publishes two versions of its shard, all
in memory that the others map. Nobody writes into another's memory, and nothing is copied that can
be read in place. What orders the accesses are words (_C.ExposedTensor) of one writer each, which
only grow, and are 0 at rest; whoever sees a word also sees what its writer did before.

| word | writer | readers | value |
|---|---|---|---|
| PUSHED | worker | servers | pushes that are whole in the mailbox; number c lies in slot c % 2 |
| LEFT | worker | servers | 1 when no push follows |
| LOOKED | worker | nobody | versions copied; orders the loads of a copy before the check of BEGUN |
| ASKED | worker | servers | twice the saves it has read; odd while it waits for one, or reads it |
| BEGUN | server | workers | the version that the server writes, or has written |
| DONE | server | workers | the newest whole version v, in buffer v % 2; the first is 1 |
| APPLIED w | server | worker w | pushes of w that version DONE has |
| CONSUMED w | server | worker w | pushes of w that nobody will read again |
| SLOWEST | server | workers | the least APPLIED of the workers that have neither left nor died |
| SAVED w | server | worker w | the ASKED that its note to w answers: where a save is, or an error |

A signal of the window follows PUSHED and LEFT: it only wakes a server, which then looks at the
words of all workers. What a server saves for the one that would go on with its shard has a BEGUN
and DONE of its own (replica.py). The rules:

- push c: wait until every server's CONSUMED is at least c - 1, write slot c % 2, PUSHED = c + 1.
- an update: apply one push (sync: one of every living worker, in ascending rank), BEGUN = v + 1,
  write buffer (v + 1) % 2, DONE = v + 1, then SLOWEST and APPLIED; save, then CONSUMED.
- pull after c pushes: wait until every server's SLOWEST is at least c - staleness (sync: 0; async:
  no wait), then copy version v = DONE, and again if BEGUN has reached v + 2 meanwhile. So a slow
  worker never holds a server up, and never sees half a version.
- a save: a server that finds ASKED odd, and all pushes of the worker applied, copies its state to
  memory of its own between two updates, notes the address, SAVED = ASKED. It frees that once ASKED
  has changed, or the worker is gone. Servers look for ASKED every 20 ms.
- a state is loaded by all ranks together, before the first push: as a version without a push.
- a worker that is seen to have died makes no push any more; PUSHED is looked at after that. So all
  servers agree on which pushes it has made.
- a server that is seen to have died: the next server starts from the last whole save, and publishes
  it in words of its own. Pushes that the save lacks are still in the mailboxes, and applied again:
  in "sync" to the same bits, otherwise perhaps in another order. Workers find the words of the dead
  server silent, and turn to those.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rota import _C, options
from rota.errors import PeerFailed, RotaError, Timeout, TransportError
from rota.parameter_server import arguments, saving
from rota.parameter_server.connection import Connection
from rota.parameter_server.loop import PUSH_CHANNEL
from rota.parameter_server.mailbox import Mailbox
from rota.parameter_server.setup import MakeOptimizer, PushLayout, Setup
from rota.parameter_server.shard import (
    APPLIED,
    CONSUMED,
    SAVED,
    SLOWEST,
    PublishedShard,
    ServerShard,
    word_of,
)
from rota.rendezvous.alike import check_alike
from rota.rendezvous.groups import member_group
from rota.rendezvous.joint import JointSteps
from rota.shared.double_buffer import DONE, NUM_SLOTS
from rota.shared.wire import Wire
from rota.window import Window


class ParameterServer:
    """Trains a model through servers, each of which holds some of its parameters.

    A worker pushes gradients and pulls parameters; a server applies a torch optimizer to a float32
    copy of its parameters, in one of three modes:

    - "sync": an update is the mean of one push of every worker, and pull() waits for it. Training
      has the bits of `Communicator.all_reduce(op="avg")` in float32 and the same optimizer.
    - "async": every push is an update, applied as it arrives; pull() never waits.
    - "stale": as "async", but pull() waits until all pushes of all workers but the puller's last
      `staleness` are applied: stale-synchronous parallel (Ho et al., NeurIPS 2013).

    A worker that dies is no longer waited for. A server that dies is replaced by its replica, and
    every push is applied once.

    Args:
        parameters_or_module: the same on every rank; what requires a gradient is trained. CPU
            tensors of float32, bfloat16 or float16. They get the values of the group's rank 0.
            Buffers stay as each rank has them.
        make_optimizer: called on a server with its float32 parameters (a list, of whole ones);
            returns their optimizer. Called again for replicas and loaded states. None if weights
            are averaged.
        group: the ranks, all on one host; None is the default group, on any backend.
        servers: ranks (of the group) that do nothing but serve: they call serve(). None: every
            rank works and serves, in a thread of its own.
        mode: "sync", "async" or "stale".
        staleness: of mode "stale": 0 or more clocks, which a worker may be ahead of the slowest. A
            worker's clock is its number of pushes.
        average_weights: workers push weights instead of gradients, as after some steps of their
            own. "sync": their mean becomes the parameters. Otherwise each push replaces its share,
            one over the number of workers.
        wire_dtype, block_scaling: round pushes, as in HookState; None or float32: no rounding. Sums
            and parameters stay float32.
        error_feedback: add each rounding error to the worker's next push (Seide et al. 2014); needs
            4 bytes per parameter. An Inf or NaN leaves no error behind.
        delay_compensation: lambda of DC-ASGD (Zheng et al., ICML 2017), which corrects delayed
            gradients to first order; 0: none. Not for "sync".
        lr_lambda: lr_lambda(i) is the factor of the optimizer's learning rates in update i of a
            server, from 0, as in torch.optim.lr_scheduler.LambdaLR.
        replicas: servers that hold a copy of each server's state and go on if it dies: 0, or 1,
            which is the default where there are several servers. Learning rates must then come from
            lr_lambda.
        timeout: of every wait for another rank; None is that of the group.

    Making one is collective: every rank of the group makes them in the same order. It blocks until
    all ranks have. After that ranks are on their own. Calls of one rank come from one thread.

    Raises:
        TypeError, ValueError: an argument is invalid; the text says what is valid. The other ranks
            raise rota.TransportError, which names the rank.
        rota.Mismatch: ranks have different parameters or arguments; names them.
        rota.TransportError: ranks are on several hosts, or memory is short.
        rota.Timeout: a rank did not come in time.

    Example:
        >>> server = rota.parameter_server.ParameterServer(
        ...     model, lambda parameters: torch.optim.AdamW(parameters), mode="stale", staleness=2
        ... )
        >>> for inputs, targets in loader:
        ...     loss_of(model(inputs), targets).backward()
        ...     server.step()  # push(), then pull()
        ...     model.zero_grad()
        >>> server.close()
    """

    def __init__(
        self,
        parameters_or_module: Iterable[torch.Tensor] | nn.Module,
        make_optimizer: MakeOptimizer | None,
        group: dist.ProcessGroup | None = None,
        *,
        servers: Sequence[int] | None = None,
        mode: str = "sync",
        staleness: int | None = None,
        average_weights: bool = False,
        wire_dtype: torch.dtype | None = None,
        block_scaling: bool | None = None,
        error_feedback: bool = False,
        delay_compensation: float = 0.0,
        lr_lambda: Callable[[int], float] | None = None,
        replicas: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        pg = member_group(group, "ParameterServer")
        steps = JointSteps.over(pg, "ParameterServer")
        self._rank, self._world_size = steps.rank, steps.world_size

        def check() -> dict[str, object]:
            self._timeout = steps.take_timeout(timeout)
            arguments.check_mode(mode, staleness, delay_compensation)
            arguments.check_weights(
                average_weights, make_optimizer, error_feedback, delay_compensation, lr_lambda
            )
            in_blocks = options.scales_blocks(wire_dtype, block_scaling)
            wire = arguments.check_wire(wire_dtype, in_blocks, error_feedback)
            self._servers = arguments.ranks_that_serve(servers, self._world_size)
            self._num_replicas = arguments.num_replicas(replicas, len(self._servers))
            self._named = arguments.named_parameters(parameters_or_module)
            self._wire = Wire(wire, in_blocks)
            shapes = [f"{list(p.shape)} {p.dtype}" for p in self._named.values()]
            return {
                "host": _C.host_id(),
                "the parameters": ", ".join(shapes),
                "servers": str(self._servers),
                "mode": mode,
                "staleness": staleness,
                "average_weights": average_weights,
                "wire_dtype": str(self._wire),
                "delay_compensation": delay_compensation,
                "replicas": self._num_replicas,
            }

        arguments.check_alike(steps.step(check))
        self._store = steps.store
        self._num_loads = 0
        # Not detached: model.to() and `parameter.data = ...` give them other memory.
        self._parameters = list(self._named.values())
        ranks = range(self._world_size)
        self.workers = [r for r in ranks if servers is None or r not in self._servers]
        # How far this rank's clock may be ahead; None: any number.
        self._bound = {"sync": 0, "async": None, "stale": staleness}[mode]
        self._average_weights = average_weights
        layout = PushLayout(
            [p.shape for p in self._parameters],
            len(self._servers),
            self._wire,
            keeps_base=delay_compensation != 0,
        )
        setup = Setup(
            self._world_size,
            self.workers,
            self._servers,
            layout,
            mode,
            average_weights,
            delay_compensation,
            lr_lambda,
            make_optimizer,
            error_feedback,
            self._num_replicas,
        )
        # Its signals wake servers; its number is the rank's clock, for the texts of others' errors.
        self._window = Window(1, pg, dtype=torch.int64, timeout=self._timeout)
        self._has_left = False
        self._is_closed = False
        self._connection = Connection(steps, self._window, setup, self._parameters, self._timeout)
        self._loop = self._connection.loop
        # Clocks that this worker was ahead of the slowest, at its pulls, by server.
        self.staleness: dict[int, Counter[int]] = {rank: Counter() for rank in self._servers}
        self._stop = lambda: None
        if self._loop is not None and self.is_worker:
            self._loop.start()
            # Also at the process's end: a thread in a wait must not meet Python's end.
            self._stop = weakref.finalize(self, self._loop.stop)

    # ---- facts

    @property
    def is_worker(self) -> bool:
        """Whether this rank pushes and pulls."""
        return self._rank in self.workers

    @property
    def is_server(self) -> bool:
        """Whether this rank holds parameters."""
        return self._rank in self._servers

    @property
    def clock(self) -> int:
        """The number of pushes of this worker."""
        return self._own_mailbox("clock").clock

    @property
    def delays(self) -> dict[int, Counter[int]]:
        """On a server, how old gradients were: by worker's rank, a histogram of the updates between
        a pull and the application of the push that followed it."""
        if self._connection.shard is None:
            raise RuntimeError(
                f"rota.ParameterServer.delays: rank {self._rank} is no server, expected one of "
                f"{self._servers}"
            )
        return self._connection.shard.delays

    # ---- the training loop

    def push(self, gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        """Hands this worker's gradients to the servers; they may be changed after it returns.

        Waits only if a server has not applied the push before the last one.

        Args:
            gradients: one per parameter, dense CPU tensors of its shape, in float32 or its dtype;
                None for zeroes. Without it, the parameters' `.grad`, or the parameters themselves
                if weights are averaged.

        Raises:
            TypeError, ValueError: they do not fit the parameters; nothing is pushed.
            RuntimeError: this rank only serves.
            rota.PeerFailed: a server died, and nothing can replace it; names it.
            rota.Timeout: a server did not apply a push in time.
            rota.RotaError: this is closed.
        """
        mailbox = self._own_mailbox("push")
        values: list[torch.Tensor | None]
        if gradients is not None:
            values = [v.detach() if isinstance(v, torch.Tensor) else v for v in gradients]
        elif self._average_weights:
            values = [p.detach() for p in self._parameters]
        else:
            values = [p.grad for p in self._named.values()]
        arguments.check_pushed(list(self._named), self._parameters, values)
        shards = self._connection.shards
        for shard in shards:
            self._wait("push", shard, word_of(self._rank, CONSUMED), mailbox.clock + 1 - NUM_SLOTS)
        versions = [shard.pulled_version for shard in shards]
        mailbox.write(values, self._parameters, versions)
        self._window.tensor[0] = mailbox.clock
        self._ring_servers()

    def pull(self) -> None:
        """Copies the newest parameters into this worker's, in place.

        "sync" and "stale" wait first, also for a worker that pushes less often than the others,
        until it calls close(). The parameters of one server are always of one version; those of
        several servers may be some updates apart, except in "sync".

        Raises what push() raises; the parameters then stay as they were.
        """
        mailbox = self._own_mailbox("pull")
        for shard in self._connection.shards:
            if self._bound is not None:
                self._wait("pull", shard, SLOWEST, mailbox.clock - self._bound)
            elif not shard.opened.is_open:
                self._switch("pull", shard)
        for shard in self._connection.shards:
            ahead = mailbox.clock - shard.opened.load(SLOWEST)
            self.staleness[self._servers[shard.server]][max(0, ahead)] += 1
        self._connection.pull()

    def step(self, gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        """push(gradients), then pull()."""
        self.push(gradients)
        self.pull()

    def flush(self) -> None:
        """Blocks until every push of this worker is applied; raises what push() raises.

        When all workers have flushed, pull() gives all of them the same parameters.
        """
        mailbox = self._own_mailbox("flush")
        for shard in self._connection.shards:
            self._wait("flush", shard, word_of(self._rank, APPLIED), mailbox.clock)

    # ---- saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the training, from all servers, on this worker. Not collective.

        In "sync" it is the state between two steps of this worker. In the other modes servers may
        be some updates apart, as in pull(); for one state of all, have every worker call flush()
        first, and push again after a barrier that follows the call.

        Returns:
            A dict of "num_updates": of each server, or the most; "parameters": float32, by name
            ("parameter 0" of a list); "optimizer": None, or a dict of "state" and "param_groups",
            the optimizer's entries and options by name of the parameter; and what error feedback
            owes on this worker: "worker", "num_workers" and "residuals", by name. Without
            error_feedback the states of all workers are alike, and one of them is enough.

        Raises what push() raises, and rota.TransportError if a server cannot make its save.
        """
        mailbox = self._own_mailbox("state_dict")
        self.flush()
        saves = []
        with mailbox.asking() as question:
            for shard in self._connection.shards:
                saves.append(self._read_save(shard, question))
        names = list(self._named)
        residuals = (residual.clone() for residual in mailbox.residuals())
        return {
            **saving.merged(saves, names),
            "worker": self.workers.index(self._rank),
            "num_workers": len(self.workers),
            "residuals": dict(zip(names, residuals, strict=False)),
        }

    def _read_save(self, shard: PublishedShard, question: int) -> saving.Save:
        while True:
            self._wait("state_dict", shard, word_of(self._rank, SAVED), question)
            try:
                return shard.read_save(self._rank, self._timeout)
            except TransportError:
                if shard.opened.is_open:
                    raise
                self._switch("state_dict", shard)  # the server has died

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state_dict(), with the same or another number of servers and workers.

        Collective: every rank calls it with the same state, before the first push; dedicated
        servers before serve(). With error_feedback each worker loads what it saved itself;
        residuals that another worker saved, or one of another number of workers, are dropped.
        docs/parameter-server.md says when training then has the bits of one that never stopped.

        The options of the optimizer, such as its learning rate, become those that were saved; with
        lr_lambda, learning rates are make_optimizer's times the factor of the next update.

        Args:
            state_dict: of the same parameters, whose order may be another.

        Raises:
            TypeError, ValueError: it is the state of other parameters or another optimizer; nothing
                was loaded. The other ranks raise rota.TransportError, which names the rank.
            RuntimeError: this worker has pushed, or a dedicated server serves.
            rota.Mismatch: ranks have states of different updates.
            rota.Timeout: a rank did not come in time.
        """
        self._check_open("load_state_dict")
        connection, names = self._connection, list(self._named)
        prepared: list[ServerShard] = []  # this server's, if it is one
        residuals: dict[str, torch.Tensor] = {}

        number, self._num_loads = self._num_loads, self._num_loads + 1
        steps = JointSteps(
            dist.PrefixStore(f"load/{number}", self._store),
            self._rank,
            self._world_size,
            self._timeout,
            "rota.ParameterServer.load_state_dict",
            lambda: self._check_none_serves(number),
        )

        def prepare() -> dict[str, object]:
            self._check_server()
            self._check_none_serves(number)
            if connection.mailbox is not None and connection.mailbox.clock > 0:
                raise RuntimeError(
                    f"rota.ParameterServer.load_state_dict: rank {self._rank} has pushed "
                    f"{connection.mailbox.clock} times, expected a call before the first push; "
                    f"make a new rota.ParameterServer"
                )
            shapes = {name: parameter.shape for name, parameter in self._named.items()}
            saving.check(state_dict, shapes, self._average_weights)
            if connection.mailbox is not None:
                place = self.workers.index(self._rank), len(self.workers)
                residuals.update(saving.residuals_of(state_dict, shapes, *place))
            if (shard := connection.prepare(state_dict, names)) is not None:
                prepared.append(shard)
            return {"num_updates of the state": state_dict["num_updates"]}

        def commit() -> None:
            for shard in prepared:
                connection.go_on_with(shard)
            owed = [] if connection.mailbox is None else connection.mailbox.residuals()
            for name, residual in zip(names, owed, strict=False):
                residual.copy_(residuals[name]) if residuals else residual.zero_()

        check_alike("rota.ParameterServer.load_state_dict", steps.step(prepare))
        steps.step(commit)
        steps.step(connection.pull)  # before anyone can push

    def _check_none_serves(self, load: int) -> None:
        """Raises RuntimeError if a dedicated server serves without having taken part in a load."""
        for rank in set(self._servers) - set(self.workers):
            # How many loads it took part in; there once it is in serve().
            key = f"serving/{rank}"
            if self._store.check([key]) and int(self._store.get(key)) <= load:
                raise RuntimeError(
                    f"rota.ParameterServer.load_state_dict: rank {rank} is in serve(); call "
                    f"load_state_dict() on every rank, on servers before serve()"
                )

    # ---- serving and leaving

    def serve(self) -> None:
        """Serves on a rank of `servers`, until every worker has closed or died. Blocks.

        Raises:
            RuntimeError: this rank works.
            rota.RotaError: this is closed.
            Exception: what an optimizer raised; workers see that the server has ended.
        """
        self._check_open("serve")
        if self._loop is None or self.is_worker:
            raise RuntimeError(
                f"rota.ParameterServer.serve: rank {self._rank} works, and serves in the "
                f"background if at all; call serve() on dedicated servers only"
            )
        self._store.set(f"serving/{self._rank}", str(self._num_loads))
        try:
            self._loop.run()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves: no push follows. Idempotent; not collective.

        A worker that also serves first waits for the other workers to close. Pushes that are not
        applied yet will be.

        Raises:
            rota.Timeout: workers have not closed in time; this rank goes on serving, and close()
                can be called again.
            Exception: what an optimizer raised on this server.
        """
        if self._is_closed:
            return
        self._leave()
        if self._loop is not None and self.is_worker and not self._loop.join(self._timeout):
            raise Timeout(
                f"rota.ParameterServer.close: rank {self._rank}/{self._world_size} waited "
                f"{self._timeout.total_seconds():g} s for workers {self._loop.awaited} to close; "
                f"it goes on serving: close on every worker"
            )
        self._end()
        self._check_server()

    def _leave(self) -> None:
        if self.is_worker and not self._has_left:
            self._has_left = True
            self._own_mailbox("close").leave()
            self._ring_servers()

    def _end(self) -> None:
        self._stop()
        self._is_closed = True
        self._window.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            # The others may need this rank for long; the error comes first.
            self._leave()
            self._end()

    # ---- waiting

    def _own_mailbox(self, call: str) -> Mailbox:
        self._check_open(call)
        if self._connection.mailbox is None:
            raise RuntimeError(
                f"rota.ParameterServer.{call}: rank {self._rank} only serves, expected one of the "
                f"workers {self.workers}; call serve()"
            )
        return self._connection.mailbox

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise RotaError(f"rota.ParameterServer.{call}: this is closed; make a new one")

    def _check_server(self) -> None:
        """Raises what has ended this rank's server."""
        if self._loop is not None and self._loop.error is not None:
            raise self._loop.error

    def _ring_servers(self) -> None:
        for rank in self._servers:
            with contextlib.suppress(PeerFailed):  # the next wait finds out
                self._window.signal(rank, PUSH_CHANNEL)

    def _wait(self, call: str, shard: PublishedShard, word: int, value: int) -> None:
        while shard.opened.load(word) < value:
            try:
                if not shard.opened.wait(word, value, self._timeout):
                    raise self._late(call, shard, word, value)
            except PeerFailed:
                self._switch(call, shard)

    def _switch(self, call: str, shard: PublishedShard) -> None:
        """Goes on with the replica of a shard whose server has died, once it is there."""
        self._check_server()
        lost = f"server rank {shard.rank} (pid {shard.opened.pid})"
        if not shard.switch():
            raise PeerFailed(
                f"rota.ParameterServer.{call}: rank {self._rank}/{self._world_size} waits in vain "
                f"for {lost}, which has died or ended, and no replica is left; make a new "
                f"rota.ParameterServer, and load_state_dict() the last state_dict()"
            )
        self._wait(call, shard, DONE, 1)

    def _late(self, call: str, shard: PublishedShard, word: int, value: int) -> Timeout:
        waited = (
            f"rota.ParameterServer.{call}: rank {self._rank}/{self._world_size} waited "
            f"{self._timeout.total_seconds():g} s for server rank {shard.rank}"
        )
        if word == word_of(self._rank, SAVED):
            return Timeout(f"{waited} to save its parameters: is it in serve()?")
        whose = "every worker" if word == SLOWEST else "this worker"
        return Timeout(
            f"{waited} to apply {value} pushes of {whose}; workers {self._workers_behind(value)} "
            f"have pushed less often: are they alive?"
        )

    def _workers_behind(self, clock: int) -> list[int]:
        """The living workers with fewer pushes, as far as is known: for texts."""
        behind = []
        for worker in self.workers:
            with contextlib.suppress(PeerFailed):
                if int(self._window.view(worker)[0]) < clock:
                    behind.append(worker)
        return behind
