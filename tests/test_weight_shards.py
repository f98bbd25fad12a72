"""WeightStore from any sharding to any other."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import Rank, on_ranks
from rota.weights import WeightShard, WeightStore, layout
from rota.weights.copies import boxes

pytestmark = pytest.mark.same_in_every_build

SHAPES = [(5,), (1, 4), (3, 1, 2), (2, 3, 4), (2, 1, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_cover_every_range_of_elements_in_order(shape: tuple[int, ...]) -> None:
    indices = torch.arange(math.prod(shape)).view(shape)
    for begin, end in itertools.combinations(range(math.prod(shape) + 1), 2):
        covered: list[int] = []
        found = list(boxes(shape, begin, end))
        for box in found:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            elems = indices[place].flatten().tolist()
            assert elems[0] == box.first_elem
            covered += elems
        assert covered == list(range(begin, end))
        assert len(found) <= 2 * len(shape) - 1


def use_short_buckets() -> None:
    layout.BUCKET_BYTES = 64
    layout.ENCODED_BUCKET_ELEMS = 64


def full_tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Values that every wire format holds exactly."""
    shapes = {"matrix": (7, 5), "cube": (4, 6, 3), "vector": (10,), "wide": (2, 33)}
    return {
        name: (torch.arange(math.prod(shape)) % 16 * scale).view(shape)
        for name, shape in shapes.items()
    }


ONE_DIM = [(Shard(0),), (Shard(1),), (Replicate(),)]
TWO_DIMS = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
]


def place(tensor: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> DTensor:
    """A vector has no dimension 1, so it is sharded along 0 instead."""
    fitting = [Shard(0) if p.is_shard() and p.dim >= tensor.ndim else p for p in placements]
    return distribute_tensor(tensor, mesh, fitting)


@pytest.mark.parametrize("wire", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("world_size", "mesh_shape"), [(3, (3,)), (4, (2, 2))])
@on_ranks()
def test_any_placement_can_be_pulled_into_any_other(
    rank: Rank, mesh_shape: tuple[int, ...], wire: torch.dtype | None
) -> None:
    use_short_buckets()
    rank.init("gloo")
    mesh = init_device_mesh("cpu", mesh_shape)
    choices = ONE_DIM if len(mesh_shape) == 1 else TWO_DIMS
    for number, source in enumerate(choices):
        store = rank.make_store()
        publisher = WeightStore(
            store, group=dist.group.WORLD, wire_dtype=wire, block_scaling=wire is not None
        )
        for version in (1, 2):
            full = full_tensors(float(version))
            publisher.publish(version, {k: place(x, mesh, source) for k, x in full.items()})
            dist.barrier()
        for target in choices:
            like = {k: place(x, mesh, target) for k, x in full_tensors().items()}
            reader = WeightStore(store, "weights", shards=like)
            pulled, weights = reader.pull()
            assert pulled == 2, (number, target)
            into = {k: place(torch.zeros_like(x), mesh, target) for k, x in full.items()}
            reader.pull(into=into)
            for name, tensor in full.items():
                expected = place(tensor, mesh, target)
                for got in (weights[name], into[name]):
                    assert isinstance(got, DTensor) and got.placements == expected.placements
                    assert torch.equal(got.to_local(), expected.to_local()), (source, target, name)
        _, whole = WeightStore(store).pull()
        assert all(torch.equal(whole[name], full[name]) for name in full)
        dist.barrier()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)


@pytest.mark.parametrize(
    ("world_size", "mesh_shape"), [(4, (3,)), (5, (2, 2))], ids=["uneven", "over-tensor-parallel"]
)
@on_ranks()
def test_fsdp_shards_reach_a_reader_outside_of_the_group(
    rank: Rank, mesh_shape: tuple[int, ...]
) -> None:
    """All ranks but the last train; the last samples, outside of their group."""
    use_short_buckets()
    store, group_store = rank.make_store(), rank.make_store()
    num_trainers = math.prod(mesh_shape)
    torch.manual_seed(0)
    model = Model() if len(mesh_shape) == 2 else nn.Linear(5, 7)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if rank.rank == num_trainers:
        _, weights = WeightStore(store).pull(at_least=5)
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in plain)
        # A tensor-parallel sampler's half of the columns, and nothing else.
        name, tensor = next(iter(plain.items()))
        half = tensor.shape[1] // 2
        shard = WeightShard(tensor.shape, (0, half), (len(tensor), tensor.shape[1] - half))
        _, weights = WeightStore(store, shards={name: shard}).pull()
        assert weights.keys() == {name} and torch.equal(weights[name], tensor[:, half:])
        rank.say()
        return
    dist.init_process_group("gloo", store=group_store, rank=rank.rank, world_size=num_trainers)
    if len(mesh_shape) == 2:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape))
    publisher = WeightStore(store, group=dist.group.WORLD)
    publisher.publish(4, {name: tensor * 0 for name, tensor in model.state_dict().items()})
    publisher.publish(5, model.state_dict())
    rank.await_word()


class Strided(NamedTuple):
    """As torch's _StridedShard."""

    dim: int
    split_factor: int


def test_strided_shards_with_holes_are_refused() -> None:
    pair, rows = (2, 2), (8, 3)
    layout.check_strides("w", (Strided(0, 2), Shard(0)), pair, rows)
    layout.check_strides("w", (Strided(0, 3), Replicate(), Shard(0)), (2, 2, 3), (12, 3))
    for placements, shape in (
        ((Strided(0, 2), Shard(1)), rows),
        ((Shard(0), Strided(0, 2)), rows),
        ((Strided(0, 2), Shard(0)), (7, 3)),
    ):
        with pytest.raises(ValueError, match="a rank's part has holes"):
            layout.check_strides("w", placements, pair, shape)


@on_ranks(1)
def test_partial_sums_are_refused(rank: Rank) -> None:
    rank.init("gloo")
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="still to be summed; redistribute it first"):
        WeightStore(rank.make_store(), rank=0).publish(1, {"w": partial})
