"""WeightStore with bad input: errors name both sides, and nothing is half applied."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks
from rota.weights import WeightShard, WeightStore

pytestmark = pytest.mark.same_in_every_build


def test_version_that_does_not_grow_is_refused_and_nothing_changes(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    publisher.publish(8, {"w": torch.full((4,), 8.0)})
    for version in (8, 7):
        with pytest.raises(ValueError, match=rf"version {version} comes after version 8"):
            publisher.publish(version, {"w": torch.zeros(4)})
    with pytest.raises(ValueError, match="-1, expected an int of at least 0"):
        publisher.publish(-1, {"w": torch.zeros(4)})
    assert reader.pull()[0] == 8 and reader.pull()[1]["w"].sum() == 32


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(4, 2)}, r"'w' is \(4, 2\) of float32, but was \(2, 4\) of float32"),
        ({"w": torch.zeros(2, 4, dtype=torch.int32)}, r"'w' is \(2, 4\) of int32"),
        ({"v": torch.zeros(2, 4)}, "'w' is missing, but was"),
        ({"w": torch.zeros(2, 4), "v": torch.zeros(1)}, "'v' is .* but was missing"),
    ],
)
def test_other_tensors_than_in_the_first_version_are_refused(
    store: dist.Store, tensors: dict[str, torch.Tensor], message: str
) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    publisher.publish(1, {"w": torch.ones(2, 4)})
    with pytest.raises(ValueError, match=message):
        publisher.publish(2, tensors)
    publisher.publish(2, {"w": torch.ones(2, 4)})
    assert reader.pull()[0] == 2


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"x": torch.zeros(3)}, r"this reader \(pid \d+\) wants 'x', which is not among the 2"),
        ({"w": torch.zeros(3, 2)}, r"\[0:3, 0:2\] of \(3, 2\).*published \[0:2, 0:3\] of \(2, 3\)"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, "in float64 as 'w'.*in float32"),
    ],
)
def test_reader_with_other_tensors_gets_an_error_and_nothing_is_written(
    store: dist.Store, into: dict[str, torch.Tensor], message: str
) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    publisher.publish(1, {"v": torch.ones(5), "w": torch.ones(2, 3)})
    good = torch.zeros(5)
    with pytest.raises(rota.Mismatch, match=message) as caught:
        reader.pull(into={"v": good, **into})
    assert good.count_nonzero() == 0
    assert f"publisher 0/1 of 'weights' (pid {os.getpid()})" in str(caught.value)
    assert reader.pull()[0] == 1


def test_second_publisher_of_a_rank_is_refused(store: dist.Store) -> None:
    first, second = (WeightStore(store, rank=0) for _ in range(2))
    first.publish(1, {"w": torch.ones(2)})
    pid = os.getpid()
    with pytest.raises(
        rota.Mismatch, match=rf"two publishers of rank 0: .*\(pid {pid}\).* this one \(pid {pid}\)"
    ):
        second.publish(2, {"w": torch.zeros(2)})
    first.publish(2, {"w": torch.ones(2)})
    assert WeightStore(store).pull()[1]["w"].sum() == 2
    first.close()
    with pytest.raises(rota.RotaError, match="is closed"):
        first.publish(3, {"w": torch.ones(2)})
    second.publish(3, {"w": torch.zeros(2)})
    assert WeightStore(store).pull()[0] == 3


Case = tuple[dict[str, Any], torch.Tensor]


def part(offset: int, rows: int, of: int = 4, dtype: torch.dtype = torch.float32) -> Case:
    shard = WeightShard((of, 2), (offset, 0), (rows, 2))
    return {"shards": {"w": shard}}, torch.ones(rows, 2, dtype=dtype)


# What each of two publishers has, and what both are told.
DISAGREEMENTS: list[tuple[Case, Case, str]] = [
    (({}, torch.ones(4, 2)), ({}, torch.ones(4, 2)), "publisher 0/2 .* and publisher 1/2 .* both"),
    (part(0, 2), part(1, 3), r"both publish.*\[0:2, 0:2\].* and \[1:4, 0:2\]"),
    (part(0, 2), part(3, 1), r"only 6 of the 8.*0/2 .* has \[0:2.*1/2 .* has \[3:4"),
    (part(0, 2), part(2, 2, of=5), r"disagree.*0/2 .*\(4, 2\).*1/2 .*\(5, 2\)"),
    (part(0, 2), part(2, 2, dtype=torch.int32), "disagree.*of float32.*of int32"),
    (
        ({}, torch.ones(1)),
        ({"num_publishers": 3}, torch.ones(1)),
        "differ in the number of publishers",
    ),
]


@on_ranks(2, timeout_s=180)
def test_publishers_that_disagree_all_get_an_error_that_names_both(rank: Rank) -> None:
    for *sides, pattern in DISAGREEMENTS:
        options, tensor = sides[rank.rank]
        options = {"num_publishers": 2, "timeout": timedelta(seconds=10), **options}
        store = rank.make_store()
        publisher = WeightStore(store, rank=rank.rank, **options)
        error, text = error_of(publisher.publish, 1, {"w": tensor})
        done = rank.make_store()  # publishers live until both have seen the error
        done.set(str(rank.rank), "")
        done.wait(["0", "1"])
        reader = WeightStore(store, timeout=timedelta(0))
        assert error_of(reader.pull)[0] == "Timeout"  # nothing was published
        assert error == "Mismatch" and re.search(pattern, text), (pattern, text)


@on_ranks(2)
def test_publishers_of_different_versions_get_an_error(rank: Rank) -> None:
    store = rank.make_store()
    shards = {"w": WeightShard((2,), (rank.rank,), (1,))}
    publisher = WeightStore(store, rank=rank.rank, num_publishers=2, shards=shards)
    publisher.publish(1, {"w": torch.full((1,), 1.0)})
    message = r"publication 2 is version .* on publisher .*, but version .* on publisher "
    if rank.rank == 0:
        publisher.publish(2, {"w": torch.full((1,), 2.0)})
        rank.say("published")
        rank.await_word("refused")
        assert WeightStore(store).pull()[0] == 2
    else:
        rank.await_word("published")
        with pytest.raises(rota.Mismatch, match=message):
            publisher.publish(3, {"w": torch.full((1,), 3.0)})
        version, weights = WeightStore(store).pull()
        assert version == 1 and weights["w"].tolist() == [1, 1]  # nothing was half applied
        publisher.publish(2, {"w": torch.full((1,), 2.0)})
        rank.say("refused")
        rank.await_word("end")
    rank.say("end")


@on_ranks(2)
def test_failure_of_one_publisher_reaches_the_other(rank: Rank) -> None:
    store = rank.make_store()
    shards = {"w": WeightShard((4,), (1,), (3,))} if rank.rank == 1 else None
    publisher = WeightStore(store, rank=rank.rank, num_publishers=2, shards=shards)
    error = error_of(publisher.publish, 1, {"w": torch.ones(2)})
    text = "its shard is [1:4] of (4,)"
    if rank.rank == 1:
        check_error(error, "ValueError", text)
        rank.await_word("end")  # the failure of a process that has ended could be an old one
    else:
        check_error(error, "TransportError", "publisher 1/2", text)
    rank.say("end")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 2, "num_publishers": 2}, ValueError, "rank is 2, expected 0 to"),
        ({"rank": 0, "block_scaling": True}, ValueError, "needs a wire_dtype"),
        ({"rank": 0, "wire_dtype": torch.float32}, ValueError, "expected float16, bfloat16"),
        (
            {"rank": 0, "wire_dtype": torch.bfloat16, "block_scaling": True},
            ValueError,
            "bfloat16, expected float16, float8_e4m3fn, float8_e5m2 with block_scaling",
        ),
        ({"wire_dtype": torch.bfloat16}, ValueError, "is the publisher's"),
        ({"rank": 0, "shards": {"w": torch.ones(2)}}, TypeError, "must be WeightShards"),
    ],
)
def test_bad_options_are_refused(
    store: dist.Store, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        WeightStore(store, **options)


def test_wrong_calls_are_refused(store: dist.Store) -> None:
    publisher, reader = WeightStore(store, rank=0), WeightStore(store)
    with pytest.raises(ValueError, match="this is a reader"):
        reader.publish(1, {})
    with pytest.raises(ValueError, match="this is a publisher"):
        publisher.pull()
    with pytest.raises(TypeError, match="'w' is 3, expected a tensor"):
        publisher.publish(1, {"w": 3})
    with pytest.raises(TypeError, match=r"'w' is torch.strided on meta, expected .* CPU"):
        publisher.publish(1, {"w": torch.empty(2, device="meta")})
    with pytest.raises(TypeError, match=r"expected a torch\.distributed.Store"):
        WeightStore("store")
    with pytest.raises(ValueError, match="expected a part that lies within it"):
        WeightShard((4,), (2,), (3,))


@on_ranks(2)
def test_reader_on_another_host_is_refused(rank: Rank) -> None:
    os.environ["ROTA_HOST_ID"] = f"host{rank.rank}"
    store = rank.make_store()
    if rank.rank == 0:
        publisher = WeightStore(store, rank=0)
        publisher.publish(1, {"w": torch.ones(2)})
        rank.await_word("end")
    else:
        with pytest.raises(
            rota.TransportError, match="is on host host0, this process on host host1"
        ):
            WeightStore(store).pull()
        rank.say("end")
