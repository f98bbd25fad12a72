"""Where the weights of a WeightStore lie: within whole tensors, and in a publisher's memory.

Knows no processes and no Store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from rota import _torch
from rota.errors import Mismatch
from rota.sharding import as_dtensor, holders_of
from rota.shared.aligned import AlignedLayout
from rota.shared.buckets import BUCKET_BYTES, checked_bytes
from rota.shared.wire import Wire

# Elements of a bucket that is stored in a wire format, a multiple of every scaled block: its 4 MiB
# of float32 stay in the last cache between conversion and encoding.
ENCODED_BUCKET_ELEMS = 1 << 20


@dataclass(frozen=True)
class WeightShard:
    """A rectangular part of a larger tensor, for `WeightStore`.

    Args:
        global_shape: of the whole tensor.
        offset: the index of the part's first element, by dimension.
        shape: of the part.

    Raises:
        ValueError: numbers of dimensions differ, or the part lies outside the whole.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("global_shape", "offset", "shape"):
            object.__setattr__(self, field, tuple(map(int, getattr(self, field))))
        lengths = {len(self.global_shape), len(self.offset), len(self.shape)}
        if len(lengths) != 1 or any(
            offset < 0 or length < 0 or offset + length > whole
            for whole, offset, length in zip(
                self.global_shape, self.offset, self.shape, strict=True
            )
        ):
            raise ValueError(
                f"rota.WeightShard: offset {self.offset} and shape {self.shape} in a tensor of "
                f"shape {self.global_shape}, expected a part that lies within it"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> WeightShard:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def num_elems(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{offset}:{offset + length}"
            for offset, length in zip(self.offset, self.shape, strict=True)
        )
        return f"[{ranges}] of {self.global_shape}"


def shard_of(name: str, tensor: torch.Tensor, shards: Mapping[str, WeightShard]) -> WeightShard:
    """Where this process's part of a tensor lies: the placements of a DTensor tell; a plain one is
    whole unless it is in `shards`."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        shard = shards.get(name) or WeightShard.whole(tensor.shape)
        if shard.shape != tuple(tensor.shape):
            raise ValueError(
                f"rota.WeightStore: {name!r} has shape {tuple(tensor.shape)}, but its shard is "
                f"{shard}; pass a tensor of the shard's shape, {shard.shape}"
            )
        return shard
    if any(placement.is_partial() for placement in dtensor.placements):
        raise ValueError(
            f"rota.WeightStore: {name!r} is placed {dtensor.placements}, and its parts are still "
            f"to be summed; redistribute it first"
        )
    check_strides(name, dtensor.placements, tuple(dtensor.device_mesh.shape), dtensor.shape)
    shape, offset = _torch.local_shape_and_offset(dtensor)
    if 0 in shape:  # torch then places it behind the end, where it may have any offset
        offset = (0,) * len(shape)
    return WeightShard(tuple(dtensor.shape), offset, shape)


def check_strides(
    name: str, placements: Sequence[object], mesh_shape: Sequence[int], shape: Sequence[int]
) -> None:
    """Raises ValueError for strided shards (FSDP2 over tensor parallel) that are not contiguous.

    They are if the mesh dimensions to the right split the same dimension into as many parts as the
    stride skips, all of one length.
    """
    for mesh_dim, placement in enumerate(placements):
        split_factor = getattr(placement, "split_factor", 1)
        if split_factor == 1:
            continue
        dim = placement.dim  # type: ignore[attr-defined]  # all strided placements have it
        same = [i for i, other in enumerate(placements) if getattr(other, "dim", None) == dim]
        num_later = math.prod(mesh_shape[i] for i in same if i > mesh_dim)
        num_parts = math.prod(mesh_shape[i] for i in same)
        if split_factor != num_later or shape[dim] % num_parts != 0:
            raise ValueError(
                f"rota.WeightStore: {name!r} of shape {tuple(shape)} is placed {placements} on a "
                f"mesh of {tuple(mesh_shape)}, so a rank's part has holes; redistribute it first"
            )


@dataclass(frozen=True)
class TensorPart:
    """One publisher's part of one tensor, row by row in its memory."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shard: WeightShard
    wire_dtype: str | None  # None: elements are stored as they are
    block_scaling: bool

    @property
    def wire(self) -> Wire:
        dtype = None if self.wire_dtype is None else dtype_named(self.wire_dtype)
        return Wire(dtype, self.block_scaling)


class StoredBucket(NamedTuple):
    """What one checksum covers: elements of a part."""

    part: TensorPart
    begin_elem: int
    num_elems: int

    @property
    def num_bytes(self) -> int:
        return self.part.wire.num_bytes(self.num_elems, dtype_named(self.part.dtype))


@dataclass(frozen=True)
class Layout:
    """All parts of one publisher, in each of its two buffers."""

    parts: tuple[TensorPart, ...]

    @cached_property
    def buckets(self) -> list[StoredBucket]:
        buckets = []
        for part in self.parts:
            itemsize = dtype_named(part.dtype).itemsize
            is_wide = part.wire_dtype is None
            max_elems = BUCKET_BYTES // itemsize if is_wide else ENCODED_BUCKET_ELEMS
            for begin in range(0, part.shard.num_elems, max_elems):
                num_elems = min(max_elems, part.shard.num_elems - begin)
                buckets.append(StoredBucket(part, begin, num_elems))
        return buckets

    @cached_property
    def memory(self) -> AlignedLayout[str | int]:
        """A buffer's "header", which is number, version and checksums, and the buckets."""
        lengths: dict[str | int, int] = {"header": checked_bytes(2 + len(self.buckets))}
        lengths |= {i: bucket.num_bytes for i, bucket in enumerate(self.buckets)}
        return AlignedLayout({name: (torch.uint8, (n,)) for name, n in lengths.items()})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        return cls(
            tuple(
                TensorPart(**{**part, "shard": WeightShard(**part["shard"])})
                for part in json.loads(text)["parts"]
            )
        )


def lay_out(
    tensors: Mapping[str, torch.Tensor], shards: Mapping[str, WeightShard], wire: Wire
) -> Layout:
    """The layout of one publisher's tensors; shards are as in shard_of()."""
    parts = []
    for name, tensor in tensors.items():
        dtensor = as_dtensor(tensor)
        # Only the first of the ranks that hold the same part of a DTensor publishes it.
        if dtensor is None or holders_of(dtensor)[:1] == [dist.get_rank()]:
            narrow = wire if wire.narrows(tensor.dtype) else Wire()
            parts.append(
                TensorPart(
                    name,
                    name_of(tensor.dtype),
                    shard_of(name, tensor, shards),
                    None if narrow.dtype is None else name_of(narrow.dtype),
                    narrow.block_scaling,
                )
            )
    return Layout(tuple(parts))


Form = tuple[tuple[int, ...], torch.dtype, Sequence[object]]


def forms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Form]:
    """What must stay from version to version: global shape, dtype and placements, by name."""
    return {
        name: (tuple(tensor.shape), tensor.dtype, () if dtensor is None else dtensor.placements)
        for name, tensor, dtensor in ((name, x, as_dtensor(x)) for name, x in tensors.items())
    }


def check_unchanged(first: Mapping[str, Form], now: Mapping[str, Form]) -> None:
    if first == now:
        return
    name = next(name for name in [*first, *now] if first.get(name) != now.get(name))
    before, after = (
        "missing" if form is None else f"{form[0]} of {name_of(form[1])} {form[2] or ''}".strip()
        for form in (first.get(name), now.get(name))
    )
    raise ValueError(
        f"rota.WeightStore.publish: {name!r} is {after}, but was {before} in the first version; "
        f"nothing was published; make another WeightStore for other weights"
    )


def check_together(layouts: Sequence[Layout], publishers: Sequence[str]) -> None:
    """Raises Mismatch unless every element of every tensor is published once."""
    what = "rota.WeightStore.publish"
    for name, parts in parts_by_name(layouts).items():
        first_publisher, first = parts[0]
        for publisher, part in parts[1:]:
            if part.dtype != first.dtype or part.shard.global_shape != first.shard.global_shape:
                raise Mismatch(
                    f"{what}: publishers disagree about {name!r}: {publishers[first_publisher]} "
                    f"has {first.shard} of {first.dtype}, {publishers[publisher]} has "
                    f"{part.shard} of {part.dtype}; nothing was published"
                )
        pair = first_overlap([part.shard for _, part in parts])
        if pair is not None:
            (one, one_part), (other, other_part) = (parts[i] for i in pair)
            raise Mismatch(
                f"{what}: {publishers[one]} and {publishers[other]} both publish a part of "
                f"{name!r}: {one_part.shard} and {other_part.shard}; nothing was published; of "
                f"a tensor that several ranks hold, only one may publish it, or pass a DTensor"
            )
        num_elems = sum(part.shard.num_elems for _, part in parts)
        expected = math.prod(first.shard.global_shape)
        if num_elems != expected:
            have = ", ".join(f"{publishers[i]} has {part.shard}" for i, part in parts)
            raise Mismatch(
                f"{what}: only {num_elems} of the {expected} elements of {name!r} are published: "
                f"{have}; nothing was published"
            )


def parts_by_name(layouts: Iterable[Layout]) -> dict[str, list[tuple[int, TensorPart]]]:
    """The parts of each tensor, with the index of their publisher."""
    parts: dict[str, list[tuple[int, TensorPart]]] = {}
    for publisher, layout in enumerate(layouts):
        for part in layout.parts:
            parts.setdefault(part.name, []).append((publisher, part))
    return parts


def first_overlap(shards: Sequence[WeightShard]) -> tuple[int, int] | None:
    """The first two shards of one tensor that have an element in common."""
    size = (len(shards), len(shards[0].global_shape))
    begins, lengths = (
        torch.tensor(indices, dtype=torch.int64, device="cpu").view(size)
        for indices in ([shard.offset for shard in shards], [shard.shape for shard in shards])
    )
    ends = begins + lengths
    meet = torch.maximum(begins[:, None], begins) < torch.minimum(ends[:, None], ends)
    pairs = meet.all(dim=-1).triu(diagonal=1).nonzero()
    return None if len(pairs) == 0 else (int(pairs[0, 0]), int(pairs[0, 1]))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
