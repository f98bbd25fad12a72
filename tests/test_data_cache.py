"""examples/data_cache.py, data_order.py: never wrong bytes, one order for any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data_cache
import pytest
import torch
from data_cache import open_corpus, read_corpus
from data_order import GlobalBatchSampler, Windows, data_loader
from torch import Tensor
from train_gpt import windows

from ranks import kill_self

pytestmark = pytest.mark.same_in_every_build

CONTEXT = 64
GLOBAL_BATCH = 12


@dataclasses.dataclass
class Place:
    """Sources and a cache of them."""

    sources: Path
    cache: Path

    def open(self) -> tuple[Tensor, Tensor]:
        return open_corpus(self.cache, self.sources)

    def text(self) -> Tensor:
        return read_corpus(self.sources)[0]

    def check(self) -> None:
        for text, expected in zip(self.open(), read_corpus(self.sources), strict=True):
            assert torch.equal(text, expected)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Sources with files of 27,500 random bytes in two folders, 10 of which are held out."""
    place = Place(tmp_path / "sources", tmp_path / "cache")
    (place.sources / "package").mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    for name in ("a.py", "package.py", *(f"package/{index}.py" for index in range(60))):
        content = torch.randint(256, (27_500,), dtype=torch.uint8, generator=generator)
        (place.sources / name).write_bytes(content.numpy().tobytes())
    return place


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, place: Place) -> Iterator[Callable[[], int]]:
    """How often a cache has been built, by this process and by those that it forks."""
    num_builds = multiprocessing.Value("i", 0)

    def count_build(root: Path) -> tuple[Tensor, Tensor]:
        with num_builds.get_lock():
            num_builds.value += 1
        return read_corpus(root)

    monkeypatch.setattr(data_cache, "read_corpus", count_build)
    yield lambda: num_builds.value


def in_processes(target: Callable[[], None], num_processes: int) -> list[int | None]:
    """Runs `target` in forked processes at a time; returns their exit codes."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


# ---- The cache


def test_second_start_reads_the_cache(place: Place, builds: Callable[[], int]) -> None:
    for _ in range(2):
        place.check()
        assert builds() == 1


def test_concurrent_first_starts_build_once(place: Place, builds: Callable[[], int]) -> None:
    assert in_processes(place.check, 4) == [0] * 4
    assert builds() == 1


def test_killed_build_leaves_nothing_that_counts(place: Place, builds: Callable[[], int]) -> None:
    """The builder dies when all is written, before its last step."""

    def die() -> None:
        data_cache.Path.rename = lambda *_: kill_self()
        place.open()

    assert in_processes(die, 1) == [-signal.SIGKILL]
    place.check()
    assert builds() == 2


def edit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda sources: edit(sources / "package.py"),
    "grown": lambda sources: (sources / "package.py").write_bytes(bytes(30_000)),
    "added": lambda sources: (sources / "package" / "new.py").write_text("new"),
    "added-folder": lambda sources: shutil.copytree(sources / "package", sources / "b"),
    "removed": lambda sources: next((sources / "package").glob("?.py")).unlink(),
    "moved": lambda sources: (sources / "a.py").rename(sources / "b.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_stale_cache_is_built_again(place: Place, builds: Callable[[], int], change: str) -> None:
    before, text = place.open()[0], place.text()
    CHANGES[change](place.sources)
    for _ in range(2):
        place.check()
        assert builds() == 2
    assert torch.equal(before, text)  # a job that still runs keeps its text


@pytest.mark.parametrize(
    "damage", [edit, Path.unlink, lambda file: os.truncate(file, file.stat().st_size // 2)]
)
def test_damaged_cache_is_built_again(
    place: Place, builds: Callable[[], int], damage: Callable[[Path], None]
) -> None:
    place.open()
    (file,) = place.cache.glob("*.pt")
    damage(file)
    place.check()
    assert builds() == 2


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert data_cache.default_folder() == Path("/own")
    monkeypatch.delenv("ROTA_CACHE_DIR")
    assert data_cache.default_folder() == Path("/xdg/rota")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_cache.default_folder() == Path("/home/me/.cache/rota")


# ---- Samples


@pytest.mark.parametrize("context", [1, CONTEXT])
def test_windows_are_those_of_the_demo(place: Place, context: int) -> None:
    samples, text = Windows(place.open()[0], context), place.text()
    assert len(samples) == (len(text) - 1) // context
    for index in (0, 1, len(samples) - 1):
        inputs, targets = windows(text, torch.tensor([index * context]), context)
        assert torch.equal(samples[index][0], inputs[0])
        assert torch.equal(samples[index][1], targets[0])
    with pytest.raises(IndexError):
        samples[len(samples)]


# ---- Order


def test_order_stays_the_same_over_releases() -> None:
    """Saved positions mean the same samples only as long as this holds."""
    batches = GlobalBatchSampler(221_204, 4, seed=0, rank=0, world_size=1)
    assert next(batches) == [35916, 83534, 11314, 9189]


def batches_of(
    num_samples: int, world_size: int, global_batch: int = GLOBAL_BATCH, seed: int = 5
) -> list[Any]:
    run = {"seed": seed, "world_size": world_size}
    ranks = range(world_size)
    return [GlobalBatchSampler(num_samples, global_batch, rank=rank, **run) for rank in ranks]


def consume(ranks: list[Any], num_steps: int) -> list[int]:
    """The samples of all ranks, by step and then by rank."""
    steps = (itertools.chain(*(next(rank) for rank in ranks)) for _ in range(num_steps))
    return list(itertools.chain(*steps))


def test_epochs_have_each_sample_once_and_differ() -> None:
    (rank,) = batches_of(96, 1)
    first, second = (consume([rank], 8) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(96))
    assert first != second
    assert consume(batches_of(96, 1, seed=6), 8) not in (first, second)


@pytest.mark.parametrize("world_size", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("num_steps", [0, 5, 8, 11])
def test_order_is_the_same_and_goes_on_with_any_world_size(num_steps: int, world_size: int) -> None:
    """Also over the end of the epoch, which comes after 8 steps with 4 samples left over."""
    ranks = batches_of(100, 2)
    before = consume(ranks, num_steps)
    first, second = (rank.state_dict() for rank in ranks)
    assert first == second
    resumed = batches_of(100, world_size)
    for rank in resumed:
        rank.load_state_dict(json.loads(json.dumps(first)))
    assert before + consume(resumed, 20 - num_steps) == consume(batches_of(100, 1), 20)


def test_order_goes_on_with_another_global_batch() -> None:
    ranks = batches_of(96, 2)
    before = consume(ranks, 5)
    resumed = batches_of(96, 2, global_batch=6)
    for rank in resumed:
        rank.load_state_dict(ranks[0].state_dict())
    assert before + consume(resumed, 6) == consume(batches_of(96, 1), 8)


@pytest.mark.parametrize("other", [{"num_samples": 101}, {"seed": 6}], ids=["samples", "seed"])
def test_order_of_another_run_is_refused(other: dict[str, int]) -> None:
    (rank,) = batches_of(100, 1)
    with pytest.raises(ValueError, match="the saved order has"):
        rank.load_state_dict(rank.state_dict() | other)


@pytest.mark.parametrize(("global_batch", "world_size"), [(2, 3), (101, 1)])
def test_global_batch_out_of_range_is_refused(global_batch: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"a global batch of {global_batch}, expected"):
        batches_of(100, world_size, global_batch=global_batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_goes_on_with_another_world_size(place: Place, num_workers: int) -> None:
    train, _ = place.open()

    def loaders(world_size: int) -> list[Any]:
        place = {"seed": 5, "world_size": world_size}
        shape = (train, CONTEXT, GLOBAL_BATCH, num_workers)
        return [data_loader(*shape, rank=rank, **place) for rank in range(world_size)]

    def inputs_of(ranks: list[Any], num_steps: int) -> Tensor:
        return torch.cat([next(rank)[0] for _ in range(num_steps) for rank in ranks])

    before_of = loaders(2)
    running = [iter(loader) for loader in before_of]
    before = inputs_of(running, 3)
    state = before_of[1].state_dict()
    after_of = loaders(3)
    for loader in after_of:
        loader.load_state_dict(state)
    after = inputs_of([iter(loader) for loader in after_of], 3)

    chosen = torch.tensor(consume(batches_of(len(Windows(train, CONTEXT)), 1), 6))
    expected, _ = windows(place.text(), chosen * CONTEXT, CONTEXT)
    assert torch.equal(torch.cat([before, after]), expected)
