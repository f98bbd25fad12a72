"""From publishers' buckets to a reader's tensors: which bytes are copied where.

A plan is made once for each set of tensors, and then only runs. A bucket that is a contiguous part
of one of the reader's tensors is copied there at once. Any other bucket is copied to scratch
memory, which stays in a cache, decoded there if it is in a wire format, and its parts copied from
there. Buckets of which the reader needs nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rota import _C
from rota.layout import flat_of, is_flat
from rota.weights.layout import Bucket, Entry, WeightShard, Wire, dtype_named
from rota.weights.memory import OpenedPublisher

Indices = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor that is one range of its elements, row by row."""

    first_elem: int
    offset: Indices
    shape: Indices


def boxes(shape: Indices, begin: int, end: int) -> Iterator[Box]:
    """Cuts elements [begin, end) of a tensor into at most 2 * len(shape) - 1 boxes."""
    if len(shape) == 0:
        yield Box(begin, (), ())
        return
    row_elems = math.prod(shape[1:])
    first_row, end_row = -(-begin // row_elems), end // row_elems  # of whole rows
    if begin < first_row * row_elems:
        yield from boxes_in_row(shape, first_row - 1, begin, min(end, first_row * row_elems))
    if first_row < end_row:
        rest = len(shape) - 1
        offset = (first_row, *[0] * rest)
        yield Box(first_row * row_elems, offset, (end_row - first_row, *shape[1:]))
    if first_row * row_elems <= end_row * row_elems < end:
        yield from boxes_in_row(shape, end_row, end_row * row_elems, end)


def boxes_in_row(shape: Indices, row: int, begin: int, end: int) -> Iterator[Box]:
    row_begin = row * math.prod(shape[1:])
    for box in boxes(shape[1:], begin - row_begin, end - row_begin):
        yield Box(box.first_elem + row_begin, (row, *box.offset), (1, *box.shape))


class Cut(NamedTuple):
    """What a box and a reader's shard have in common, as indices of either."""

    in_box: tuple[slice, ...]
    in_shard: tuple[slice, ...]


def cut(box: Box, box_origin: Indices, shard: WeightShard) -> Cut | None:
    """None if they have no element in common.

    Args:
        box_origin: the index, in the whole tensor, of the tensor that the box is a part of.
    """
    starts = [origin + offset for origin, offset in zip(box_origin, box.offset, strict=True)]
    in_box, in_shard = [], []
    for start, length, offset, shard_length in zip(
        starts, box.shape, shard.offset, shard.shape, strict=True
    ):
        begin, end = max(start, offset), min(start + length, offset + shard_length)
        if begin >= end:
            return None
        in_box.append(slice(begin - start, end - start))
        in_shard.append(slice(begin - offset, end - offset))
    return Cut(tuple(in_box), tuple(in_shard))


@dataclass
class BucketCopy:
    """One bucket's way; tensors are views that are made once.

    Attributes:
        publisher, bucket: indices of the publisher, and of the checksum among its own.
        sources: the bucket's bytes in the publisher's two buffers.
        copied: where they are copied to; uint8.
        wire: what `decoded`, float32, is decoded from; None for elements that are as they are.
        parts: what is copied from there, as pairs (to, from).
    """

    publisher: int
    bucket: int
    name: str
    sources: tuple[torch.Tensor, torch.Tensor]
    copied: torch.Tensor
    wire: Wire | None
    decoded: torch.Tensor | None
    parts: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self, buffer: int, checksum: int) -> bool:
        """Copies the bucket from a buffer; False, with nothing decoded, if it is damaged."""
        if _C.copy_with_checksum(self.copied, self.sources[buffer]) != checksum:
            return False
        if self.wire is not None and self.decoded is not None:
            _C.decode(self.decoded, self.copied, self.wire.dtype, self.wire.block_scaling)
        for to, source in self.parts:
            to.copy_(source)
        return True


class Wanted(NamedTuple):
    """A tensor of the reader, and the shard that it is to hold."""

    tensor: torch.Tensor
    shard: WeightShard


def plan(publishers: Sequence[OpenedPublisher], wanted: Mapping[str, Wanted]) -> list[BucketCopy]:
    """The copies that fill the tensors of `wanted`, which are contiguous and on the CPU."""
    scratch = Scratch()
    copies = [
        plan_bucket(number, publisher, entry, bucket_index, bucket, wanted[entry.name], scratch)
        for number, publisher in enumerate(publishers)
        for entry in publisher.layout.entries
        if entry.name in wanted
        for bucket_index, bucket in enumerate(entry.buckets(), entry.first_bucket)
    ]
    return [copy for copy in copies if copy is not None]


def plan_bucket(
    number: int,
    publisher: OpenedPublisher,
    entry: Entry,
    bucket_index: int,
    bucket: Bucket,
    wanted: Wanted,
    scratch: Scratch,
) -> BucketCopy | None:
    """None if nothing of the bucket is wanted."""
    end_elem = bucket.begin_elem + bucket.num_elems
    cuts = [
        (box, overlap)
        for box in boxes(entry.shard.shape, bucket.begin_elem, end_elem)
        if (overlap := cut(box, entry.shard.offset, wanted.shard)) is not None
    ]
    if not cuts:
        return None
    dtype, wire = dtype_named(entry.dtype), entry.wire
    decoded_dtype = dtype if wire is None else torch.float32
    targets = [wanted.tensor[overlap.in_shard] for _, overlap in cuts]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if targets[0].numel() == bucket.num_elems and is_flat(targets[0]) and dtype == decoded_dtype:
        elems = flat_of(targets[0])
    else:
        elems = scratch.elems(bucket.num_elems, decoded_dtype)
        for (box, overlap), target in zip(cuts, targets, strict=True):
            begin = box.first_elem - bucket.begin_elem
            source = elems[begin:][: math.prod(box.shape)].view(box.shape)[overlap.in_box]
            parts.append((target, source))
    one, other = (buffer[bucket.begin :][: bucket.num_bytes] for buffer in publisher.buffers)
    return BucketCopy(
        number,
        bucket_index,
        entry.name,
        (one, other),
        elems.view(torch.uint8) if wire is None else scratch.encoded(bucket.num_bytes),
        wire,
        None if wire is None else elems,
        parts,
    )


class Scratch:
    """Memory that all buckets of a plan use in turn."""

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def elems(self, num_elems: int, dtype: torch.dtype) -> torch.Tensor:
        return self._view("elems", num_elems * dtype.itemsize).view(dtype)

    def encoded(self, num_bytes: int) -> torch.Tensor:
        return self._view("encoded", num_bytes)

    # The first buckets of a tensor are the longest, so this seldom allocates again; earlier views
    # then keep the shorter memory.
    def _view(self, use: str, num_bytes: int) -> torch.Tensor:
        memory = self._bytes.get(use)
        if memory is None or len(memory) < num_bytes:
            memory = self._bytes[use] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return memory[:num_bytes]
