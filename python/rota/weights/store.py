"""WeightStore: weights on their way from trainers to whoever samples with them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from rota import _C, options, timeouts
from rota.rendezvous.groups import check_group, end_watch
from rota.shared.wire import Wire
from rota.weights.directory import Directory
from rota.weights.layout import WeightShard, name_of
from rota.weights.publisher import Publisher, telling_publishers
from rota.weights.reader import Reader, places_of


class WeightStore:
    """Versions of a model's weights that trainers publish and readers pull, on one host.

    The trainers' ranks publish their shards, however the model is sharded, and keep the last two
    versions in shared memory. A reader copies the newest from there, whole and with checksums, in
    shards of its own. Readers need no process group, come and go at any time, and are never waited
    for. When a publisher dies, readers that have pulled from it still get its last whole version,
    and find it again once it has started under the same rank (docs/weights.md).

    With several publishers, all publish the same versions, each its shards, and publish() of one
    version waits until all are done with the version before. If one of them ends, publish() raises
    on the others; start all of them again, each with a new WeightStore.

    One thread at a time may use a WeightStore. A publisher ends with close(), with its WeightStore,
    or with its process.

    Args:
        store: the same for all; a TCPStore, FileStore or HashStore, or a group's store.
        name: of the weights; one store serves any number of names.
        rank: which publisher this is, from 0 on; None is a reader.
        num_publishers: how many there are. Readers need not know.
        group: gives a publisher its rank and num_publishers; any process group, on any backend.
        shards: a publisher's give the place of plain tensors that are parts of larger ones; others
            are whole, and DTensors know their place. A reader's give the names to pull, with a
            WeightShard for each, or a tensor like the one that is wanted (dtype and shape are
            checked; a DTensor's placements apply). None pulls everything, whole.
        wire_dtype: a publisher stores tensors of a wider float dtype rounded to this one, once and
            to nearest: float16, bfloat16, float8_e4m3fn or float8_e5m2. float64 is rounded to
            float32 first. Readers get the dtype that was published.
        block_scaling: of wire_dtype, as in `rota.HookState`.
        timeout: of each publish() and pull(); None is that of the group or the store.

    Raises:
        TypeError, ValueError: arguments that do not fit together. If a publisher raises, the others
            raise rota.TransportError in their first publish(), which names it.

    Example:
        >>> store = dist.TCPStore("localhost", 29500, is_master=rank == 0)
        >>> trainer = rota.weights.WeightStore(store, rank=0)  # in the trainer's process
        >>> trainer.publish(step, model.state_dict())
        >>> sampler = rota.weights.WeightStore(store)  # in another one
        >>> step, weights = sampler.pull(at_least=step + 1)
        >>> model.load_state_dict(weights, assign=True)
    """

    def __init__(
        self,
        store: dist.Store,
        name: str = "weights",
        *,
        rank: int | None = None,
        num_publishers: int = 1,
        group: dist.ProcessGroup | None = None,
        shards: Mapping[str, WeightShard | torch.Tensor] | None = None,
        wire_dtype: torch.dtype | None = None,
        block_scaling: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if not isinstance(store, dist.Store):
            raise TypeError(
                f"rota.WeightStore: store is {store!r}, expected a torch.distributed.Store"
            )
        if not isinstance(name, str):
            raise TypeError(f"rota.WeightStore: name is {name!r}, expected a str")
        check_group("rota.WeightStore", "group", group)
        has_place = rank is not None or num_publishers != 1
        if group is not None:
            rank, num_publishers = group.rank(), group.size()
        if rank is not None and not 0 <= rank < num_publishers:
            raise ValueError(
                f"rota.WeightStore: rank is {rank}, expected 0 to num_publishers - 1, "
                f"{num_publishers - 1}"
            )
        directory = Directory(store, name, None if group is None else end_watch(group))
        telling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if rank is not None:
            telling = telling_publishers(directory, name, rank, num_publishers)
        with telling:
            if group is not None and has_place:
                raise ValueError(
                    "rota.WeightStore: rank and num_publishers follow from group; leave them out"
                )
            if shards is not None and not isinstance(shards, Mapping):
                raise TypeError(
                    f"rota.WeightStore: shards is of type {type(shards).__name__}, expected a dict "
                    f"by name"
                )
            wire = _checked_wire(rank, wire_dtype, block_scaling)
            plain = {k: x for k, x in (shards or {}).items() if isinstance(x, WeightShard)}
            if rank is not None and shards is not None and len(plain) != len(shards):
                raise TypeError("rota.WeightStore: shards of a publisher must be WeightShards")
            wait = timeouts.of_store(store) if group is None else timeouts.of_group(group)
            if rank is None:
                wait = timeouts.checked(timeout, "rota.WeightStore", wait)
            else:
                wait = timeouts.checked_positive(timeout, "rota.WeightStore", wait)
        self._publisher: Publisher | None = None
        self._reader: Reader | None = None
        if rank is None:
            places = None if shards is None else places_of(shards, {})
            self._reader = Reader(directory, name, places, plain, wait)
        else:
            self._publisher = Publisher(directory, name, rank, num_publishers, plain, wire, wait)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Stores this rank's shards as a new version and shows it to all readers. Blocks.

        Copies all bytes once, in this thread. The first call also reserves the memory, and blocks
        until all publishers have called it. Later ones block until all are done with the version
        before.

        Args:
            version: from 0 on, and greater than that of the call before; a training step, for
                example. The same on all publishers. A publisher that starts again may go back.
            tensors: this rank's shards by name, on the CPU, any dtype and strides; the same names,
                shapes and dtypes each time. Of a DTensor that several ranks hold, the first one
                publishes; a plain tensor must be passed by one rank only.

        Raises:
            TypeError, ValueError: a version that does not grow, tensors on another device, or other
                ones than before. Nothing was published.
            rota.Mismatch: two publishers of one rank or of one element, elements that nobody
                publishes, publishers that differ in dtype, shape or version; names both. Nothing
                was published.
            rota.TransportError: memory is short, or publishers are on several hosts.
            rota.PeerFailed, rota.Timeout: another publisher has ended, or did not publish; names
                it.
        """
        if self._publisher is None:
            raise ValueError("rota.WeightStore.publish: this is a reader; publishers have a rank")
        self._publisher.publish(version, tensors)

    def pull(
        self,
        at_least: int = 0,
        timeout: timedelta | None = None,
        *,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Copies the newest version that is whole on all publishers. Blocks until there is one.

        The result's tensors belong to this store, which has two sets and fills them in turn: they
        stay as they are until the next but one pull(). Read them only. If there is nothing newer
        than in the last pull(), its tensors are returned again, without a copy.

        Args:
            at_least: the oldest version that will do.
            timeout: of this call, instead of the store's. Zero does not wait.
            into: tensors to fill instead, by name, on any device: DTensors, plain tensors of the
                shards given to the constructor, and whole ones. They are written, by a second copy,
                when all of the version has been checked.

        Returns:
            The version, and the tensors by name, those of `into` if it was given. Where the
            constructor got a DTensor as a shard, it is a DTensor placed like it.

        Raises:
            rota.Mismatch: names, shapes, shards or dtypes that were not published; names the
                publisher and both shapes. Nothing was written.
            rota.PeerFailed: a publisher has ended or closed and nothing new enough is whole.
            rota.Timeout: nothing new enough came in time; names who was awaited.
            rota.TransportError: a publisher has ended and this store has never pulled from it, is
                on another host, or its memory is damaged (a checksum differs).
        """
        if self._reader is None:
            raise ValueError("rota.WeightStore.pull: this is a publisher; a reader has no rank")
        timeout = timeouts.checked(timeout, "rota.WeightStore.pull", None)
        return self._reader.pull(at_least, timeout, into)

    def close(self) -> None:
        """Ends a publisher's part, as the end of its process does. Idempotent; does not wait.

        Another publisher can take its rank. The memory is freed when the readers that have pulled
        from it have gone, or pull from that other one.
        """
        if self._publisher is not None:
            self._publisher.close()


def _checked_wire(
    rank: int | None, wire_dtype: torch.dtype | None, block_scaling: bool | None
) -> Wire:
    if wire_dtype is None:
        if block_scaling:
            raise ValueError("rota.WeightStore: block_scaling needs a wire_dtype")
        return Wire()
    if rank is None:
        raise ValueError(
            "rota.WeightStore: wire_dtype is the publisher's, which readers follow; leave it out"
        )
    block_scaling = options.scales_blocks(wire_dtype, block_scaling)
    names = _C.BLOCK_SCALED_DTYPES if block_scaling else _C.WIRE_DTYPES
    allowed = [name for name in names if name != "float32"]
    if name_of(wire_dtype) not in allowed:
        raise ValueError(
            f"rota.WeightStore: wire_dtype is {wire_dtype}, expected {', '.join(allowed)}"
            + (" with block_scaling" if block_scaling else "")
        )
    return Wire(wire_dtype, block_scaling)
