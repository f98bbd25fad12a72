"""What a reader of a WeightStore does: finds the publishers, waits, copies and checks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from rota.errors import Mismatch, PeerFailed, Timeout, TransportError
from rota.rendezvous.polling import poll
from rota.sharding import as_dtensor, like, local_of
from rota.weights.copies import plan
from rota.weights.directory import Directory, PublisherClaim
from rota.weights.layout import WeightShard, dtype_named, name_of, parts_by_name, shard_of
from rota.weights.memory import OpenedPublisher, Publication


@dataclass(frozen=True)
class Place:
    shard: WeightShard
    dtype: torch.dtype | None = None  # None: the published one
    # A DTensor to place results like, if any.
    example: torch.Tensor | None = field(default=None, compare=False)


def places_of(
    wanted: Mapping[str, torch.Tensor | WeightShard], shards: Mapping[str, WeightShard]
) -> dict[str, Place]:
    """Where the tensors of `wanted`, or what they are like, lie; shards are of plain ones."""
    return {
        name: Place(value)
        if isinstance(value, WeightShard)
        else Place(shard_of(name, value, shards), value.dtype, as_dtensor(value))
        for name, value in wanted.items()
    }


class _Source:
    """All publishers that have started together."""

    def __init__(self, claims: list[PublisherClaim], publishers: list[OpenedPublisher]) -> None:
        self.tokens = [claim.token for claim in claims]
        self.publishers = publishers
        self.parts = parts_by_name(publisher.layout for publisher in publishers)
        self.whole = {
            name: Place(WeightShard.whole(parts[0][1].shard.global_shape))
            for name, parts in self.parts.items()
        }

    @property
    def is_open(self) -> bool:
        return all(publisher.opened.is_open for publisher in self.publishers)

    @property
    def num_done(self) -> int:
        """The newest publication that is whole on all publishers."""
        return min(publisher.num_done for publisher in self.publishers)

    def check(self, places: Mapping[str, Place]) -> None:
        """Raises Mismatch if something else is wanted than was published."""
        reader = f"this reader (pid {os.getpid()})"
        for name, place in places.items():
            if name not in self.parts:
                raise Mismatch(
                    f"rota.WeightStore.pull: {reader} wants {name!r}, which is not among the "
                    f"{len(self.parts)} tensors of {self.publishers[0].who}; nothing was written"
                )
            publisher, part = self.parts[name][0]
            if place.shard.global_shape != part.shard.global_shape or (
                place.dtype or dtype_named(part.dtype)
            ) != dtype_named(part.dtype):
                dtype = "" if place.dtype is None else f" in {name_of(place.dtype)}"
                raise Mismatch(
                    f"rota.WeightStore.pull: {reader} wants {place.shard}{dtype} as {name!r}, but "
                    f"{self.publishers[publisher].who} has published {part.shard} in "
                    f"{part.dtype}; nothing was written"
                )


class _Results:
    """Tensors of the reader, and the copies that fill them."""

    def __init__(self, source: _Source, places: Mapping[str, Place]) -> None:
        shards = {name: place.shard for name, place in places.items()}
        dtypes = {name: dtype_named(source.parts[name][0][1].dtype) for name in places}
        tensors = {
            name: torch.empty(shard.shape, dtype=dtypes[name], device="cpu")
            for name, shard in shards.items()
        }
        self.tensors = {
            name: tensor if (example := places[name].example) is None else like(tensor, example)
            for name, tensor in tensors.items()
        }
        self.copies = plan(source.publishers, tensors, shards)
        self.publication: Publication | None = None  # what the tensors hold, if that is whole


class Reader:
    """Pulls versions, of everything, whole, if places is None; see WeightStore.pull."""

    def __init__(
        self,
        directory: Directory,
        name: str,
        places: Mapping[str, Place] | None,
        shards: Mapping[str, WeightShard],
        timeout: timedelta,
    ) -> None:
        self._directory = directory
        self._name = name
        self._wanted = places
        self._shards = shards
        self._timeout = timeout
        self._source: _Source | None = None
        # At most two, all made for these places and this source.
        self._results: list[_Results] = []
        self._places: Mapping[str, Place] = {}
        self._results_of: _Source | None = None
        self._handed_out: _Results | None = None  # the last that the caller has got

    def pull(
        self, at_least: int, timeout: timedelta | None, into: Mapping[str, torch.Tensor] | None
    ) -> tuple[int, dict[str, torch.Tensor]]:
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        into_places = None if into is None else places_of(into, self._shards)
        num_tries = 0
        while True:
            source = self._connect(deadline)
            number = self._wait(source, at_least, deadline)
            if number is None:
                continue  # others publish now
            results = self._copy(source, number, into_places or self._wanted or source.whole)
            if results is not None:
                break
            num_tries += 1
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"rota.WeightStore.pull: within {timeout.total_seconds():g} s, {num_tries} "
                    f"copies of weights {self._name!r} were overwritten before they were whole; "
                    f"publish less often, or pull fewer tensors"
                )
        assert results.publication is not None
        version = results.publication.version
        if into is None:
            self._handed_out = results
            return version, dict(results.tensors)
        with torch.no_grad():
            for name, tensor in into.items():
                local_of(tensor).copy_(local_of(results.tensors[name]))
        return version, dict(into)

    def _connect(self, deadline: float) -> _Source:
        """The current publishers, or those before if these cannot be opened."""
        if self._source is not None:
            if not self._source.is_open:
                self._source = self._successor(self._source, deadline) or self._source
            return self._source
        claims: list[PublisherClaim] | None = None

        def are_there() -> bool:
            nonlocal claims
            claims = self._directory.current()
            return claims is not None

        if not poll(are_there, deadline) or claims is None:
            raise Timeout(
                f"rota.WeightStore.pull: waited in vain for a first version of weights "
                f"{self._name!r}; is there a publisher, with the same store and name?"
            )
        self._source = self._open(claims, deadline)
        return self._source

    def _successor(self, source: _Source, deadline: float) -> _Source | None:
        """Publishers that have come since, if they can be opened."""
        try:
            claims = self._directory.current()
            if claims is None or [claim.token for claim in claims] == source.tokens:
                return None
            return self._open(claims, deadline)
        # They have ended, too, or the Store has, which may be part of the publisher's process. The
        # last whole version of `source` is still there.
        except (TransportError, Timeout, dist.DistNetworkError, dist.DistStoreError):
            return None

    def _open(self, claims: list[PublisherClaim], deadline: float) -> _Source:
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        return _Source(
            claims,
            [self._directory.open(claim, self._directory.layout(claim), left) for claim in claims],
        )

    def _wait(self, source: _Source, at_least: int, deadline: float) -> int | None:
        """The number of a version that is new enough; None if other publishers have taken over."""
        while True:
            number = source.num_done
            publication = None
            if number > 0:
                publication = source.publishers[0].publication(number)
                if publication is None:
                    continue  # overwritten, so there is a newer one
                if publication.version >= at_least:
                    return number
            for publisher in source.publishers:
                try:
                    is_done = publisher.wait_until_done(number + 1, deadline - time.monotonic())
                except PeerFailed:
                    successor = self._successor(source, deadline)
                    if successor is None:
                        raise
                    self._source = successor
                    return None
                if not is_done:
                    have = "nothing" if publication is None else f"version {publication.version}"
                    raise Timeout(
                        f"rota.WeightStore.pull: waited in vain for version {at_least} of "
                        f"{publisher.who}, which has published {have}; is it alive?"
                    )

    def _copy(self, source: _Source, number: int, places: Mapping[str, Place]) -> _Results | None:
        """Copies a publication, unless it is here already; None if it is overwritten meanwhile."""
        if self._results_of is not source or self._places != places:
            source.check(places)
            self._results, self._handed_out = [], None
            self._results_of, self._places = source, places
        publications = []
        for publisher in source.publishers:
            publication = publisher.publication(number)
            if publication is None:
                return None
            publications.append(publication)
            if publication.version != publications[0].version:
                raise Mismatch(
                    f"rota.WeightStore.pull: publication {number} is version "
                    f"{publications[0].version} on {source.publishers[0].who}, but version "
                    f"{publication.version} on {publisher.who}; all publishers must publish the "
                    f"same versions"
                )
        for results in self._results:
            if results.publication is not None and results.publication.number == number:
                return results
        results = self._spare_results()
        results.publication = None
        for copy in results.copies:
            publisher = source.publishers[copy.publisher]
            checksum = publications[copy.publisher].checksums[copy.bucket]
            stored = publisher.slot(number)[copy.bucket]
            # What looks damaged may have been written meanwhile, just before that became visible.
            if copy.run(stored, checksum) or (
                not publisher.is_overwritten(number) and copy.run(stored, checksum)
            ):
                continue
            if not publisher.is_overwritten(number):
                raise publisher.damage(f"{copy.name!r} in version {publications[0].version}")
            return None
        if any(publisher.is_overwritten(number) for publisher in source.publishers):
            return None
        results.publication = publications[0]
        return results

    @torch.inference_mode(False)  # later pulls, which write to the results, may be outside of it
    def _spare_results(self) -> _Results:
        for results in self._results:
            if results is not self._handed_out:
                return results
        assert self._results_of is not None
        self._results.append(_Results(self._results_of, self._places))
        return self._results[-1]
