"""From publishers' buckets to a reader's tensors: which bytes are copied where.

The copies are planned once for each set of tensors, and then only run. A bucket that is a
contiguous part of one of the reader's tensors is copied there at once. Any other bucket is copied
to scratch memory, which stays in a cache, decoded there if it is in a wire format, and its parts
copied from there. Buckets of which the reader needs nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rota import _C
from rota.shared.flat import flat_of, is_flat
from rota.shared.wire import Wire
from rota.weights.layout import StoredBucket, WeightShard, dtype_named
from rota.weights.memory import OpenedPublisher

Indices = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor that is one range of its elements, row by row."""

    first_elem: int
    offset: Indices
    shape: Indices


def boxes(shape: Indices, begin: int, end: int) -> Iterator[Box]:
    """Cuts elements [begin, end) of a tensor into at most 2 * len(shape) - 1 boxes."""
    row_elems = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        offset = tuple(begin // row % length for row, length in zip(row_elems, shape, strict=True))
        # The outermost dimension of which whole rows begin here, and as many as are wanted.
        for dim, row in enumerate(row_elems):
            if begin % row == 0 and begin + row <= end:
                num_rows = min((end - begin) // row, shape[dim] - offset[dim])
                yield Box(begin, offset, ((1,) * dim + (num_rows,) + shape[dim + 1 :]))
                begin += num_rows * row
                break
        else:
            yield Box(begin, (), ())
            return


class Overlap(NamedTuple):
    """What a box and a reader's shard have in common, as indices of either."""

    in_box: tuple[slice, ...]
    in_shard: tuple[slice, ...]


def overlap_of(box: Box, box_origin: Indices, shard: WeightShard) -> Overlap | None:
    """What they have in common; box_origin is the index of the box's tensor in the whole one."""
    in_box, in_shard = [], []
    for origin, offset, length, shard_offset, shard_length in zip(
        box_origin, box.offset, box.shape, shard.offset, shard.shape, strict=True
    ):
        start = origin + offset
        begin, end = max(start, shard_offset), min(start + length, shard_offset + shard_length)
        if begin >= end:
            return None
        in_box.append(slice(begin - start, end - start))
        in_shard.append(slice(begin - shard_offset, end - shard_offset))
    return Overlap(tuple(in_box), tuple(in_shard))


@dataclass
class BucketCopy:
    """One bucket's way; tensors are views that are made once."""

    publisher: int
    bucket: int  # among the publisher's own
    name: str
    copied: torch.Tensor  # where its bytes are copied to; uint8
    wire: Wire
    decoded: torch.Tensor  # from `copied`
    parts: list[tuple[torch.Tensor, torch.Tensor]]  # what is copied from there, as pairs (to, from)

    def run(self, source: torch.Tensor, checksum: int) -> bool:
        """Copies the bucket's bytes; False, with nothing decoded, if they are damaged."""
        if _C.copy_with_checksum(self.copied, source) != checksum:
            return False
        if self.wire.dtype is not None:
            self.wire.decode(self.decoded, self.copied)
        for to, part in self.parts:
            to.copy_(part)
        return True


def plan(
    publishers: Sequence[OpenedPublisher],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, WeightShard],
) -> list[BucketCopy]:
    """The copies that fill the reader's contiguous CPU tensors, which are to hold the shards."""
    buckets = [
        (number, index, bucket)
        for number, publisher in enumerate(publishers)
        for index, bucket in enumerate(publisher.layout.buckets)
        if bucket.part.name in tensors
    ]
    # Memory that all buckets use in turn.
    scratch = [
        torch.empty(max(lengths, default=0), dtype=torch.uint8, device="cpu")
        for lengths in (
            [bucket.num_bytes for _, _, bucket in buckets],
            [bucket.num_elems * _decoded_dtype(bucket).itemsize for _, _, bucket in buckets],
        )
    ]
    copies = [
        plan_bucket(
            number, index, bucket, tensors[bucket.part.name], shards[bucket.part.name], *scratch
        )
        for number, index, bucket in buckets
    ]
    return [copy for copy in copies if copy is not None]


def plan_bucket(
    publisher: int,
    index: int,
    bucket: StoredBucket,
    tensor: torch.Tensor,
    shard: WeightShard,
    stored: torch.Tensor,
    elems: torch.Tensor,
) -> BucketCopy | None:
    """None if the tensor holds nothing of it; stored and elems are uint8 scratch memory."""
    part = bucket.part
    overlaps = [
        (box, overlap)
        for box in boxes(part.shard.shape, bucket.begin_elem, bucket.begin_elem + bucket.num_elems)
        if (overlap := overlap_of(box, part.shard.offset, shard)) is not None
    ]
    if not overlaps:
        return None
    dtype = _decoded_dtype(bucket)
    targets = [tensor[overlap.in_shard] for _, overlap in overlaps]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    is_whole = targets[0].numel() == bucket.num_elems and is_flat(targets[0])
    if is_whole and targets[0].dtype == dtype:
        decoded = flat_of(targets[0])
    else:
        decoded = elems[: bucket.num_elems * dtype.itemsize].view(dtype)
        for (box, overlap), target in zip(overlaps, targets, strict=True):
            begin = box.first_elem - bucket.begin_elem
            source = decoded[begin:][: math.prod(box.shape)].view(box.shape)[overlap.in_box]
            pairs.append((target, source))
    is_wide = part.wire.dtype is None
    copied = decoded.view(torch.uint8) if is_wide else stored[: bucket.num_bytes]
    return BucketCopy(publisher, index, part.name, copied, part.wire, decoded, pairs)


def _decoded_dtype(bucket: StoredBucket) -> torch.dtype:
    return dtype_named(bucket.part.dtype) if bucket.part.wire.dtype is None else torch.float32
