"""examples/data_cache.py, data_order.py: never wrong bytes, one order for any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import data_cache
from data_cache import Corpus, open_corpus, read_corpus
from data_order import GlobalBatchSampler, Permutation, Windows, data_loader
from train_gpt import windows

pytestmark = pytest.mark.same_in_every_build

SHARD_BYTES = 30_011  # a prime, so that shards end inside files and windows
CONTEXT = 64
GLOBAL_BATCH = 12


@dataclasses.dataclass
class Place:
    """Sources and a cache of them."""

    sources: Path
    cache: Path

    def open(self) -> Corpus:
        return open_corpus(self.cache, root=self.sources, shard_bytes=SHARD_BYTES)

    def text(self) -> Tensor:
        return read_corpus(self.sources)[0]

    def file(self, name: str) -> Path:
        (file,) = self.cache.glob(f"*/{name}")
        return file


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Sources with 5 files of 27,500 random bytes on each side, in two folders."""
    place = Place(tmp_path / "sources", tmp_path / "cache")
    (place.sources / "package").mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    names = (f"package/{index}.py" for index in itertools.count())
    on_side = {0: 0, 1: 0}
    for name in itertools.chain(["a.py", "package.py"], names):
        side = min(1, zlib.crc32(name.encode()) % 10)
        if min(on_side.values()) >= 137_500:
            break
        if on_side[side] < 137_500:
            content = torch.randint(256, (27_500,), dtype=torch.uint8, generator=generator)
            (place.sources / name).write_bytes(content.numpy().tobytes())
            on_side[side] += 27_500
    return place


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How often a cache has been built, by this process and by those that it forks."""
    num_builds = multiprocessing.Value("i", 0)
    build = data_cache._build

    def count_build(*args: Any) -> dict[str, Any]:
        with num_builds.get_lock():
            num_builds.value += 1
        return build(*args)

    monkeypatch.setattr(data_cache, "_build", count_build)
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


def check(corpus: Corpus, place: Place) -> None:
    for text, expected in zip(corpus, read_corpus(place.sources), strict=True):
        assert torch.equal(text.read(0, len(text)), expected)
        assert torch.equal(text.byte_counts, data_cache.byte_counts(expected))


# ---------------------------------------------------------------------------------------------
# The cache


def test_second_start_reads_the_cache(place: Place, builds: Callable[[], int]) -> None:
    check(place.open(), place)
    assert builds() == 1
    assert len(list(place.cache.glob("*/train-*.bin"))) == 5  # 137,500 bytes
    check(place.open(), place)
    assert builds() == 1


def test_text_survives_pickling_by_the_names_of_its_files(place: Place) -> None:
    train = place.open().train
    pickled = pickle.dumps(train)
    assert len(pickled) < 10_000
    assert torch.equal(pickle.loads(pickled).read(0, len(train)), place.text())


def test_text_outlives_its_files(place: Place) -> None:
    train = place.open().train
    shutil.rmtree(place.cache)
    assert torch.equal(train.read(0, len(train)), place.text())


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (5, 5), (137_499, 137_501)])
def test_read_outside_the_text_is_an_error(place: Place, begin: int, end: int) -> None:
    with pytest.raises(IndexError, match="of a text of 137500"):
        place.open().train.read(begin, end)


def test_concurrent_first_starts_build_once(place: Place, builds: Callable[[], int]) -> None:
    assert in_processes(lambda: check(place.open(), place), 4) == [0] * 4
    assert builds() == 1


@pytest.mark.parametrize("victim", ["write_bytes", "write_text", "rename"])
def test_killed_build_leaves_nothing_that_counts(
    place: Place, builds: Callable[[], int], victim: str
) -> None:
    """The builder dies at its first shard, before its manifest, or before its last step."""

    def die() -> None:
        def kill(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(data_cache.Path, victim, kill)
        place.open()

    assert in_processes(die, 1) == [-signal.SIGKILL]
    assert len(list(place.cache.glob("*.partial"))) == 1
    check(place.open(), place)
    assert builds() == 2
    assert not list(place.cache.glob("*.partial"))


def edit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
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
    before = place.open().train
    text = place.text()
    CHANGES[change](place.sources)
    check(place.open(), place)
    assert builds() == 2
    assert torch.equal(before.read(0, len(before)), text)  # a job that still runs keeps its text
    check(place.open(), place)
    assert builds() == 2


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def change_format(manifest: Path) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-00002.bin", truncate),
        ("held_out-00000.bin", Path.unlink),
        ("manifest.json", truncate),
        ("manifest.json", Path.unlink),
        ("manifest.json", change_format),
    ],
    ids=["shard-truncated", "shard-gone", "manifest-truncated", "manifest-gone", "other-format"],
)
def test_incomplete_cache_is_built_again(
    place: Place, builds: Callable[[], int], name: str, damage: Callable[[Path], None]
) -> None:
    place.open()
    damage(place.file(name))
    check(place.open(), place)
    assert builds() == 2


def test_damaged_shard_is_an_error_until_the_cache_is_removed(place: Place) -> None:
    place.open()
    file = place.file("train-00002.bin")
    edit(file)
    train = place.open().train
    assert torch.equal(train.read(0, 2 * SHARD_BYTES), place.text()[: 2 * SHARD_BYTES])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"train-00002.bin is damaged: .*; remove .*/corpus"):
            train.read(2 * SHARD_BYTES - 1, 2 * SHARD_BYTES + 1)
    shutil.rmtree(file.parent)
    check(place.open(), place)


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert data_cache.default_folder() == Path("/own")
    monkeypatch.delenv("ROTA_CACHE_DIR")
    assert data_cache.default_folder() == Path("/xdg/rota")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_cache.default_folder() == Path("/home/me/.cache/rota")


# ---------------------------------------------------------------------------------------------
# Samples


@pytest.mark.parametrize("context", [1, CONTEXT, 40_000], ids=["byte", "usual", "over-2-shards"])
def test_windows_are_those_of_the_text_without_cache(place: Place, context: int) -> None:
    samples, text = Windows(place.open().train, context), place.text()
    assert len(samples) == (len(text) - 1) // context
    around_ends = {end // context + near for end in (0, SHARD_BYTES) for near in (-1, 0, 1)}
    for index in {*around_ends, len(samples) - 1} & set(range(len(samples))):
        inputs, targets = windows(text, torch.tensor([index * context]), context)
        assert torch.equal(samples[index][0], inputs[0])
        assert torch.equal(samples[index][1], targets[0])
    with pytest.raises(IndexError):
        samples[len(samples)]


# ---------------------------------------------------------------------------------------------
# Order


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 1000, 1025])
def test_permutation_has_each_sample_once(num_samples: int) -> None:
    order = Permutation(num_samples, seed=3, epoch=2)
    assert sorted(order[i] for i in range(num_samples)) == list(range(num_samples))


def test_permutation_stays_the_same_over_releases() -> None:
    """Saved positions mean the same samples only as long as this holds."""
    order = Permutation(221_204, seed=0, epoch=0)
    assert [order[i] for i in range(4)] == [14132, 47899, 165047, 141466]


def batches_of(
    num_samples: int, world_size: int, *, global_batch: int = GLOBAL_BATCH, seed: int = 5
) -> list[Any]:
    samplers = [
        GlobalBatchSampler(num_samples, global_batch, seed=seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return [iter(sampler) for sampler in samplers]


def consume(ranks: list[Any], num_steps: int) -> list[int]:
    """The samples of all ranks, by step and then by rank."""
    steps = (itertools.chain(*(next(rank) for rank in ranks)) for _ in range(num_steps))
    return list(itertools.chain(*steps))


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 12])
def test_order_is_the_same_for_any_world_size(world_size: int) -> None:
    """Also over the end of the epoch, which comes after 8 steps with 4 samples left over."""
    assert consume(batches_of(100, world_size), 20) == consume(batches_of(100, 1), 20)


def test_epochs_have_each_sample_once_and_differ() -> None:
    (rank,) = batches_of(96, 1)
    first, second = (consume([rank], 8) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(96))
    assert first != second
    assert consume(batches_of(96, 1, seed=6), 8) not in (first, second)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("num_steps", [0, 5, 8, 11])
def test_order_goes_on_with_another_world_size(num_steps: int, world_size: int) -> None:
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
def test_loader_goes_on_in_the_middle_of_an_epoch_with_another_world_size(
    place: Place, num_workers: int
) -> None:
    train = place.open().train

    def loaders(world_size: int) -> list[Any]:
        return [
            data_loader(
                train,
                CONTEXT,
                GLOBAL_BATCH,
                seed=5,
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
            )
            for rank in range(world_size)
        ]

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
