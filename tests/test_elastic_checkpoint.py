"""rota.checkpoint.Checkpoint: what is saved comes back, from memory and from disk."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import rota
from checkpoints import (
    alone,
    assert_same,
    is_state_of,
    load_and_check,
    load_step,
    open_checkpoint,
    save_and_leave,
    save_steps,
    state_of,
)
from ranks import Rank, on_ranks, run_ranks

pytestmark = pytest.mark.same_in_every_build

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.bool,
]
LENGTHS = [1, 1025, 3, (16 << 20) + 1, 0, (16 << 20) + 1]  # bytes; a bucket has 16 MiB


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_tensor_of_any_dtype_and_length_comes_back(dtype: torch.dtype) -> None:
    with alone() as checkpoint:
        for step, num_bytes in enumerate(LENGTHS):
            content = torch.randint(0, 2, (num_bytes // dtype.itemsize * dtype.itemsize,))
            tensor = content.to(torch.uint8).view(dtype)
            checkpoint.save(step, tensor)
            assert_same(checkpoint.load(), (step, tensor))


def test_nested_state_comes_back_with_its_types() -> None:
    strided = torch.arange(12.0).view(3, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        0: [strided.t(), strided[:, 1], strided.expand(2, 3, 4)],
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "text": "x" * 1000,
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "nothing": None,
    }
    with alone() as checkpoint:
        checkpoint.save(0, state)
        found = checkpoint.load()
    assert_same(found, (0, state))
    assert list(found[1]) == list(state)


def test_tensors_that_are_one_stay_one_and_take_their_bytes_once() -> None:
    tied = torch.randn(1 << 20)
    with alone() as checkpoint:
        checkpoint.save(0, {"in": tied, "out": tied.view(-1)})
        assert checkpoint._newest.num_bytes < 5 << 20
        found = checkpoint.load()
    assert found[1]["in"] is found[1]["out"]
    assert found[1]["in"].equal(tied)


def test_odd_views_are_saved_and_loaded_by_value(odd_views: dict[str, torch.Tensor]) -> None:
    values = {name: view.resolve_conj().resolve_neg().clone() for name, view in odd_views.items()}
    with alone() as checkpoint:
        checkpoint.save(0, odd_views)
        found = checkpoint.load()
        for view in odd_views.values():
            view.zero_()
        checkpoint.load(into=odd_views)
    for name, value in values.items():
        assert found[1][name].equal(value) and odd_views[name].equal(value), name


def test_load_into_fills_tensors_of_any_strides_and_returns_them() -> None:
    weight = torch.randn(5, 7)
    with alone() as checkpoint:
        checkpoint.save(3, {"w": weight, "lr": 0.5})
        transposed = torch.zeros(7, 5).t()
        parameter = torch.nn.Parameter(torch.zeros(5, 7))
        for target in (transposed, parameter):
            found = checkpoint.load(into={"w": target, "lr": None})
            assert found[1]["w"] is target and found[1]["lr"] == 0.5
            assert target.equal(weight)


def test_load_without_a_version_returns_none_without_a_warning() -> None:
    with alone() as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.load() is None


def test_older_step_of_a_job_that_has_started_anew_is_the_newest(job: str) -> None:
    alone(job=job).save(8, state_of(0, 8, 10))
    with alone(job=job) as checkpoint:
        checkpoint.save(5, state_of(0, 5, 10))
        assert load_step(checkpoint, 0) == 5


@on_ranks(2)
def test_dtensors_are_saved_as_parts_and_filled_in_place(rank: Rank, job: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank.init("gloo")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    whole = torch.arange(20.0).view(5, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    with rota.checkpoint.Checkpoint(dist.group.WORLD, job=job) as checkpoint:
        checkpoint.save(0, {"w": sharded})
        into = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])
        found = checkpoint.load(into={"w": into})
        assert found[1]["w"] is into
        assert into.full_tensor().equal(whole)
        dist.barrier()


def save_for_long(rank: Rank, job: str) -> None:
    save_and_leave(rank, job, range(3), linger=timedelta.max, timeout=timedelta.max)


def test_longest_times_are_not_over_at_once(job: str) -> None:
    run_ranks(1, save_for_long, job)
    assert run_ranks(1, load_and_check, job) == [2]


def use_second(rank: Rank, job: str) -> None:
    checkpoint = open_checkpoint(rank, job, name="second")
    if load_step(checkpoint, rank.rank) is None:
        save_steps(checkpoint, rank.rank, range(5))
        return checkpoint.close(keep=True)
    assert load_step(checkpoint, rank.rank) == 4
    checkpoint.close()


def test_two_jobs_and_two_names_at_once_do_not_see_each_other() -> None:
    job, other = uuid4().hex, uuid4().hex
    run_ranks(2, save_and_leave, job, range(3))
    run_ranks(2, save_and_leave, other, range(7))
    run_ranks(2, use_second, job)
    assert run_ranks(2, load_and_check, job) == [2, 2]
    assert run_ranks(2, load_and_check, other) == [6, 6]
    run_ranks(2, use_second, job)


# ---- disk ----------------------------------------------------------------------------------------


def use_disk(rank: Rank, job: str, folder: str) -> None:
    with open_checkpoint(rank, job) as checkpoint:
        assert checkpoint.load_from_disk(folder) is None
        for step in range(3):
            checkpoint.save(step, state_of(rank.rank, step, 1000))
            if step != 1 or rank.rank != 1:  # nobody has all of step 1
                checkpoint.save_to_disk(folder).result()
        future = checkpoint.save_to_disk(folder, async_op=True)
        save_steps(checkpoint, rank.rank, (3, 4, 5))
        assert future.result().name == f"rank-{rank.rank}-of-{rank.world_size}"


def load_from_disk(rank: Rank, job: str, folder: str, step: int | None) -> int | None:
    with open_checkpoint(rank, job) as checkpoint:
        assert checkpoint.load() is None
        found = checkpoint.load_from_disk(folder, step=step)
        if found is None:
            return None
        assert is_state_of(rank.rank, *found)
        into = {"model": {"weight": torch.zeros(1000)}, "step": None}
        again = checkpoint.load_from_disk(folder, into, step=step)
        assert again[1]["model"]["weight"] is into["model"]["weight"]
        assert is_state_of(rank.rank, *again)
        # What comes from the disk is saved to memory like anything else.
        checkpoint.save(found[0] + 1, state_of(rank.rank, found[0] + 1, 1000))
        assert load_step(checkpoint, rank.rank) == found[0] + 1
        return found[0]


def test_newest_step_that_all_ranks_have_on_disk_comes_back(tmp_path: Path) -> None:
    run_ranks(2, use_disk, uuid4().hex, str(tmp_path))
    for step, expected in ((None, 2), (0, 0), (1, None)):
        results = run_ranks(2, load_from_disk, uuid4().hex, str(tmp_path), step)
        assert results == [expected] * 2


def test_version_stays_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from rota.checkpoint import disk

    may_write = threading.Event()
    write = disk.write

    def write_later(*args: Any) -> Path:
        may_write.wait()
        return write(*args)

    monkeypatch.setattr(disk, "write", write_later)
    with alone() as checkpoint:
        checkpoint.save(0, state_of(0, 0, 1000))
        future = checkpoint.save_to_disk(tmp_path, async_op=True)
        save_steps(checkpoint, 0, range(1, 6))
        may_write.set()
        future.result()
        found = checkpoint.load_from_disk(tmp_path)
        assert is_state_of(0, *found) and found[0] == 0


def test_damaged_file_is_an_error(tmp_path: Path) -> None:
    with alone() as checkpoint:
        checkpoint.save(0, {"w": torch.full((100_000,), 0x55, dtype=torch.uint8)})
        folder = checkpoint.save_to_disk(tmp_path).result()
        (file,) = folder.glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[content.index(b"\x55" * 1000) + 500] ^= 1
        file.write_bytes(content)
        with pytest.raises(rota.TransportError, match=r"state\['w'\] of rank 0 in step 0 does not"):
            checkpoint.load_from_disk(tmp_path)
