"""WeightStore: one whole version from a publisher to readers, formats, and waiting."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from bucket_oracle import Format
from rota.weights import WeightStore, layout
from several_hosts import rounded

pytestmark = pytest.mark.same_in_every_build

SHORT = timedelta(seconds=0.2)
FORMATS = [
    (None, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.float16, True),
    (torch.float8_e4m3fn, False),
    (torch.float8_e4m3fn, True),
    (torch.float8_e5m2, True),
]


@pytest.fixture
def short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BUCKET_BYTES", 256)
    monkeypatch.setattr(layout, "ENCODED_BUCKET_ELEMS", 128)


def all_kinds(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and shapes: scalars, empty, strided, several buckets."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "matrix": randn(37, 53),
        "bfloat16": randn(1025, dtype=torch.bfloat16),
        "float64": randn(129, 3, dtype=torch.float64),
        "float8": randn(65, dtype=torch.float8_e4m3fn),
        "complex": torch.complex(randn(9), randn(9)),
        "ints": torch.randint(-9, 9, (300,), generator=generator),
        "bool": randn(67) > 0,
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 4),
        "strided": randn(6, 5, 4).transpose(0, 2),
    }


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        as_bytes = [x.contiguous().view(-1).view(torch.uint8) for x in (got[name], tensor)]
        assert got[name].shape == tensor.shape and torch.equal(*as_bytes), name


@pytest.mark.usefixtures("short_buckets")
def test_pull_gives_the_published_bits_of_every_dtype(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    for version in (0, 3, 4, 10):
        publisher.publish(version, all_kinds(version))
        pulled, weights = reader.pull()
        assert pulled == version
        assert_equal(weights, all_kinds(version))


@pytest.mark.parametrize("wire", [None, torch.float16], ids=str)
def test_odd_views_are_published_and_pulled_by_value(
    store: dist.Store, odd_views: dict[str, torch.Tensor], wire: torch.dtype | None
) -> None:
    values = {name: view.resolve_conj().resolve_neg().clone() for name, view in odd_views.items()}
    publisher = WeightStore(store, rank=0, wire_dtype=wire)
    publisher.publish(0, odd_views)
    reader = WeightStore(store)
    pulled = reader.pull()[1]
    for view in odd_views.values():
        view.zero_()
    reader.pull(into=odd_views)
    for name, value in values.items():
        assert pulled[name].equal(value) and odd_views[name].equal(value), name


@pytest.mark.usefixtures("short_buckets")
@pytest.mark.parametrize(("wire", "block_scaling"), FORMATS[1:], ids=str)
def test_wire_dtype_rounds_once(store: dist.Store, wire: torch.dtype, block_scaling: bool) -> None:
    publisher = WeightStore(store, rank=0, wire_dtype=wire, block_scaling=block_scaling)
    publisher.publish(1, all_kinds(1))
    # Blocks do not cross the buckets of 128 elements.

    def rounded_once(x: torch.Tensor) -> torch.Tensor:
        values = rounded(x.float().flatten().numpy(), Format(wire, block_scaling))
        return torch.from_numpy(values).view(x.shape).to(x.dtype)

    expected = {
        name: rounded_once(x) if x.is_floating_point() and x.dtype.itemsize > wire.itemsize else x
        for name, x in all_kinds(1).items()
    }
    _, weights = WeightStore(store).pull()
    assert_equal(weights, expected)
    is_rounded = not torch.equal(weights["matrix"], all_kinds(1)["matrix"])
    assert is_rounded and torch.equal(weights["ints"], all_kinds(1)["ints"])


def test_narrow_wire_takes_less_memory(store: dist.Store) -> None:
    weights = {"w": torch.randn(1 << 20)}
    before = WeightStore(store, "full", rank=0)
    narrow = WeightStore(store, "narrow", rank=0, wire_dtype=torch.float8_e5m2)
    sizes = []
    for publisher in (before, narrow):
        publisher.publish(0, weights)
        sizes.append(publisher._publisher._started.buffers.exposed.tensor.numel())
    assert sizes[1] < sizes[0] / 3.9


def test_results_stay_until_the_next_but_one_pull(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    pulled = []
    for version in range(1, 4):
        publisher.publish(version, {"w": torch.full((1000,), float(version))})
        pulled.append(reader.pull()[1]["w"])
        for kept in pulled[-2:]:
            assert kept.unique().numel() == 1
        if version > 1:
            assert pulled[-2][0] == version - 1
    assert pulled[0].data_ptr() == pulled[2].data_ptr() != pulled[1].data_ptr()
    again = reader.pull()[1]["w"]
    assert again.data_ptr() == pulled[2].data_ptr() and again[0] == 3


def test_pull_into_fills_the_callers_tensors_and_keeps_earlier_results(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    model = nn.Linear(5, 3)
    publisher.publish(1, {name: x + 1 for name, x in model.state_dict().items()})
    kept = reader.pull()[1]
    first = {name: x.clone() for name, x in kept.items()}
    publisher.publish(2, {name: x + 2 for name, x in model.state_dict().items()})
    own = nn.Linear(5, 3)
    version, filled = reader.pull(into=dict(own.named_parameters()))
    assert version == 2 and filled["weight"] is own.weight
    assert_equal(own.state_dict(), {name: x + 2 for name, x in model.state_dict().items()})
    assert_equal(kept, first)


def test_names_in_a_store_of_the_same_process_do_not_mix() -> None:
    store = dist.HashStore()
    publishers, readers = (
        [WeightStore(store, name, rank=rank) for name in "ab"] for rank in (0, None)
    )
    for version, publisher in enumerate(publishers):
        publisher.publish(version, {"w": torch.full((3,), float(version))})
    for version, reader in enumerate(readers):
        pulled, weights = reader.pull()
        assert pulled == version and weights["w"].eq(version).all()


@pytest.mark.usefixtures("short_buckets")
@pytest.mark.parametrize("place", ["first", "middle", "last", "checksum"])
def test_damaged_byte_is_found_and_nothing_is_written(store: dist.Store, place: str) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    publisher.publish(1, {"w": torch.ones(1000), "v": torch.ones(3)})
    started = publisher._publisher._started
    memory = started.layout.memory
    begin = memory.end + memory.begins[0]  # publication 1 is in buffer 1
    offset = {"first": begin, "middle": begin + 1999, "last": begin + 3999}.get(
        place, memory.end + 20
    )
    started.buffers.exposed.tensor[offset] ^= 4
    into = {"w": torch.zeros(1000), "v": torch.zeros(3)}
    with pytest.raises(rota.TransportError, match=r"match its checksum.*damaged"):
        reader.pull(into=into)
    assert all(tensor.count_nonzero() == 0 for tensor in into.values())
    publisher.publish(2, {"w": torch.ones(1000), "v": torch.ones(3)})
    assert reader.pull(into=into)[0] == 2 and into["w"].sum() == 1000


# ---- waiting -------------------------------------------------------------------------------------


def test_at_least_waits_for_a_new_version(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)

    def publish() -> None:
        for version in range(1, 5):
            time.sleep(0.1)
            publisher.publish(version, {"w": torch.full((10,), float(version))})

    thread = threading.Thread(target=publish)
    thread.start()
    version, weights = reader.pull(at_least=3)
    assert version == 3 and torch.equal(weights["w"], torch.full((10,), 3.0))
    thread.join()
    assert reader.pull()[0] == 4


def test_timeouts_name_who_was_awaited(store: dist.Store) -> None:
    reader = WeightStore(store, timeout=SHORT)
    with pytest.raises(rota.Timeout, match="first version of weights 'weights'; is there a"):
        reader.pull()
    publisher = WeightStore(store, rank=0)
    publisher.publish(4, {"w": torch.ones(3)})
    assert reader.pull(timeout=timedelta(0))[0] == 4
    message = rf"version 5 of publisher 0/1 of 'weights' \(pid {os.getpid()}\).*published version 4"
    with pytest.raises(rota.Timeout, match=message):
        reader.pull(at_least=5)
    pair = WeightStore(store, "pair", rank=0, num_publishers=2, timeout=SHORT)
    with pytest.raises(rota.Timeout, match=r"publisher 0/2 of 'pair'.*in vain for publisher 1;"):
        pair.publish(1, {"w": torch.ones(3)})
