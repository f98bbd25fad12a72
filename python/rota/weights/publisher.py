"""What a publisher of a WeightStore does: its memory, and the order of its writes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch

from rota import _C
from rota.errors import Mismatch, RotaError, Timeout
from rota.sharding import local_of
from rota.shared.aligned import Views
from rota.shared.buckets import write_checked
from rota.shared.double_buffer import DoubleBuffer, expose_slots
from rota.shared.flat import flat_of
from rota.shared.wire import Wire
from rota.weights.directory import Directory, PublisherClaim
from rota.weights.layout import (
    Form,
    Layout,
    WeightShard,
    check_together,
    check_unchanged,
    forms_of,
    lay_out,
)
from rota.weights.memory import OpenedPublisher


class _Started(NamedTuple):
    """What the first version makes."""

    forms: dict[str, Form]
    layout: Layout
    buffers: DoubleBuffer[Views[str | int]]
    claims: list[PublisherClaim]
    peers: list[OpenedPublisher]  # the other publishers


# Memory of claims with errors, which count until the rank gets a publisher, by name and rank.
_refused: dict[tuple[str, int], _C.ExposedTensor] = {}


@contextlib.contextmanager
def telling_publishers(
    directory: Directory, name: str, rank: int, num_publishers: int
) -> Iterator[None]:
    """An error that is raised inside is raised by the other publishers' first publish(), too."""
    try:
        yield
    except Exception as error:
        _refused[name, rank] = directory.tell(rank, num_publishers, error)
        raise


class Publisher:
    """Publishes one rank's tensors; see WeightStore.publish."""

    def __init__(
        self,
        directory: Directory,
        name: str,
        rank: int,
        num_publishers: int,
        shards: Mapping[str, WeightShard],
        wire: Wire,
        timeout: timedelta,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._num_publishers = num_publishers
        self._shards = shards
        self._wire = wire
        self._timeout = timeout
        self._who = f"publisher {rank}/{num_publishers} of {name!r} (pid {os.getpid()})"
        self._started: _Started | None = None
        self._failed: _C.ExposedTensor | None = None  # makes a claim that tells an error count
        self._is_closed = False
        self._number = 0
        self._version = -1
        _refused.pop((name, rank), None)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._is_closed:
            raise RotaError("rota.WeightStore.publish: this store is closed; make a new one")
        if not isinstance(version, int) or version < 0:
            raise ValueError(
                f"rota.WeightStore.publish: version is {version!r}, expected an int of at least 0"
            )
        if version <= self._version:
            raise ValueError(
                f"rota.WeightStore.publish: version {version} comes after version {self._version} "
                f"of {self._who}; versions must grow; nothing was published"
            )
        deadline = time.monotonic() + self._timeout.total_seconds()
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"rota.WeightStore.publish: {name!r} is {tensor!r}, expected a tensor"
                )
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise TypeError(
                    f"rota.WeightStore.publish: {name!r} is {tensor.layout} on {tensor.device}, "
                    f"expected a dense tensor on the CPU"
                )
        if self._started is None:
            try:
                self._started = self._start(tensors, deadline)
            except Exception as error:
                self._failed = self._directory.tell(self._rank, self._num_publishers, error)
                raise
        started = self._started
        check_unchanged(started.forms, forms_of(tensors))
        number = self._number + 1
        self._wait_for_peers(started.peers, number, version, deadline)

        buffer = started.buffers.begin(number)
        checksums = store(started.layout, tensors, buffer)
        write_checked(buffer["header"], [number, version, *checksums])
        started.buffers.finish(number)
        self._number, self._version = number, version
        if number == 1 and self._rank == 0:
            self._directory.set_current(started.claims)

    def _start(self, tensors: Mapping[str, torch.Tensor], deadline: float) -> _Started:
        layout = lay_out(tensors, self._shards, self._wire)
        memory, slots = expose_slots(layout.memory)
        claim = self._directory.claim(self._rank, self._num_publishers, memory, layout)
        claims = self._directory.rendezvous(claim, deadline)
        layouts = [self._directory.layout(peer) for peer in claims]
        # Before any memory is opened, which publishers that fail here take away.
        check_together(layouts, [peer.who for peer in claims])
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        peers = [
            self._directory.open(peer, layouts[peer.rank], left)
            for peer in claims
            if peer.rank != self._rank
        ]
        return _Started(forms_of(tensors), layout, DoubleBuffer(memory, slots), claims, peers)

    # Until all are done with the publication before this one, which then takes the buffer of the
    # one before that.
    def _wait_for_peers(
        self, peers: list[OpenedPublisher], number: int, version: int, deadline: float
    ) -> None:
        for peer in peers:
            if not peer.wait_until_done(number - 1, deadline - time.monotonic()):
                raise Timeout(
                    f"rota.WeightStore.publish: {self._who} waited "
                    f"{self._timeout.total_seconds():g} s for {peer.who}, which has not published "
                    f"version {self._version}; is it alive?"
                )
            for done, own in ((number - 1, self._version), (number, version)):
                publication = peer.publication(done) if 0 < done <= peer.num_done else None
                if publication is not None and publication.version != own:
                    raise Mismatch(
                        f"rota.WeightStore.publish: publication {done} is version {own} on "
                        f"{self._who}, but version {publication.version} on {peer.who}; all "
                        f"publishers must publish the same versions"
                    )

    def close(self) -> None:
        self._is_closed = True
        self._failed = self._started = None  # what readers have mapped stays as it is


def store(
    layout: Layout, tensors: Mapping[str, torch.Tensor], buffer: Views[str | int]
) -> list[int]:
    """Stores tensors in a publisher's buffer; returns the checksums of its buckets."""
    checksums = []
    places = ((bucket, buffer[i]) for i, bucket in enumerate(layout.buckets))
    for part, of_part in itertools.groupby(places, lambda place: place[0].part):
        flat, wire = flat_of(local_of(tensors[part.name]).detach()), part.wire
        for bucket, stored in of_part:
            elems = flat[bucket.begin_elem :][: bucket.num_elems]
            if wire.dtype is None:
                checksums.append(_C.copy_with_checksum(stored, elems.view(torch.uint8)))
            else:
                wire.encode(stored, elems.float())
                checksums.append(_C.checksum(stored))
    return checksums
