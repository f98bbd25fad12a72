"""The demo's text, and a cache of it: memory-mapped shard files, built once per host.

    python examples/data_cache.py     # times first and second starts, prints the order's hashes

read_corpus() reads the text from the sources of Python's standard library, open_corpus() from the
cache. Nothing here knows samples or communicates: ranks agree through a lock on a file.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from data_order import GlobalBatchSampler, Windows
from torch import Tensor

# ---------------------------------------------------------------------------------------------
# Sources

STDLIB = Path(sysconfig.get_path("stdlib"))
# Third-party code, which is installed below the same folder, and compiled files.
NOT_READ = {"site-packages", "dist-packages", "__pycache__"}
SIDES = ("train", "held_out")


def find_sources(root: Path) -> tuple[list[str], list[str]]:
    """The .py files below `root`, in a fixed order, and the folders searched, relative to it."""
    files: list[str] = []
    folders: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - NOT_READ
        relative = folder.removeprefix(str(root)).lstrip(os.sep)
        folders.append(relative or ".")
        files += [os.path.join(relative, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.split(os.sep)), sorted(folders)


def read_corpus(root: Path = STDLIB) -> tuple[Tensor, Tensor]:
    """Every .py file of the standard library, split by file: (train, held_out), 1-D uint8.

    A file's path decides its side, so the split is the same wherever this Python is installed, and
    no file is on both sides.
    """
    train, held_out = bytearray(), bytearray()
    for path in find_sources(root)[0]:
        side = held_out if zlib.crc32(path.encode()) % 10 == 0 else train
        side += (root / path).read_bytes()
    if min(len(train), len(held_out)) < 100_000:
        raise FileNotFoundError(f"found too few .py files under {root} to train on")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def byte_counts(text: Tensor) -> Tensor:
    """How often each byte occurs in `text`: int64 [256]."""
    return torch.bincount(text, minlength=256)


# ---------------------------------------------------------------------------------------------
# Cache. A folder counts as complete once it has its final name. A builder gives it that name last,
# under an exclusive lock, and readers map all shards under a shared one. Nothing is synced to the
# disk: a process that is killed loses no write, and checksums find what a power cut has lost.

FORMAT = 1  # of the manifest; also stands for how read_corpus chooses and splits files
MANIFEST = "manifest.json"
# The checksum of a shard takes 0.16 ms when it is first read (AMD EPYC, Zen 5), so that no batch
# waits long for it.
SHARD_BYTES = 1 << 20


class Text:
    """One side of the corpus, in shard files that are mapped into memory.

    The first read of a shard in each process verifies its checksum. Mappings are private, and
    outlive the files if these are replaced. Pickling takes the names of the files alone.

    Args:
        folder: of the shard files.
        about: a side's entry in the manifest.

    Raises:
        ValueError: a file has another length than the manifest says.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder, self._about = folder, about
        self._shard_bytes: int = about["shard_bytes"]
        self.byte_counts = torch.tensor(about["byte_counts"])  # as of the function byte_counts
        self._shards = []
        for name, num_bytes, _ in about["shards"]:
            path = folder / name
            if path.stat().st_size != num_bytes:
                raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {num_bytes}")
            self._shards.append(torch.from_file(str(path), size=num_bytes, dtype=torch.uint8))
        self._is_verified = [False] * len(self._shards)
        self._num_bytes = sum(map(len, self._shards))

    def __len__(self) -> int:
        return self._num_bytes

    def __reduce__(self) -> tuple[type[Text], tuple[Path, Mapping[str, Any]]]:
        return Text, (self._folder, self._about)

    def read(self, begin: int, end: int) -> Tensor:
        """A copy of bytes [begin, end), uint8.

        Raises:
            IndexError: the range is empty or not within the text.
            RuntimeError: a shard is damaged.
        """
        if not 0 <= begin < end <= len(self):
            raise IndexError(f"bytes [{begin}, {end}) of a text of {len(self)}")
        parts = []
        while begin < end:
            index, offset = divmod(begin, self._shard_bytes)
            parts.append(self._verified(index)[offset : offset + end - begin])
            begin += len(parts[-1])
        return torch.cat(parts)

    def _verified(self, index: int) -> Tensor:
        shard = self._shards[index]
        if not self._is_verified[index]:
            name, _, crc32 = self._about["shards"][index]
            if zlib.crc32(shard.numpy().data) != crc32:
                raise RuntimeError(
                    f"{self._folder / name} is damaged: its checksum is not the manifest's; "
                    f"remove {self._folder} and start again, which rebuilds it"
                )
            self._is_verified[index] = True
        return shard


class Corpus(NamedTuple):
    train: Text
    held_out: Text


def default_folder() -> Path:
    """Where rota keeps what it can make again: $ROTA_CACHE_DIR, $XDG_CACHE_HOME/rota, or
    ~/.cache/rota."""
    if own := os.environ.get("ROTA_CACHE_DIR"):
        return Path(own)
    # The XDG base directory specification says to ignore relative paths.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "rota"


def open_corpus(
    folder: Path | None = None, *, root: Path = STDLIB, shard_bytes: int = SHARD_BYTES
) -> Corpus:
    """The text of read_corpus() from the cache in `folder`, which is built if necessary.

    Processes of a host that start together build it once: the others wait. It is built again if a
    source has changed (in size or time of modification), has come or gone, or if a shard file is
    missing or has another length.

    Args:
        folder: default_folder() if None; made if missing. Use a local disk.
        shard_bytes: of a cache that is built; does not change what is read.
    """
    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"corpus-{zlib.crc32(str(root).encode()):08x}"
    with open(target.with_suffix(".lock"), "a+") as lock:
        # Going from the shared lock to the exclusive one lets others in between, so look again.
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            fcntl.flock(lock, kind)
            if corpus := _open(target, root):
                return corpus
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a builder that was killed
        partial.mkdir()
        manifest = _build(partial, root, shard_bytes)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return _map(target, manifest)


def _open(target: Path, root: Path) -> Corpus | None:
    """The corpus in `target`; None if it is not complete, or not of the sources as they are."""
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return None
        sources = manifest["sources"]
        if _states(root, (path for path, *_ in sources)) != sources:
            return None
        return _map(target, manifest)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def _map(target: Path, manifest: Mapping[str, Any]) -> Corpus:
    return Corpus(*(Text(target, manifest[side]) for side in SIDES))


def _build(partial: Path, root: Path, shard_bytes: int) -> dict[str, Any]:
    """Writes the shard files and the manifest, and returns the latter."""
    # States come first: what changes while the files are read makes this cache a stale one. With
    # the time of its folder, a file that comes or goes is noticed without a search.
    files, folders = find_sources(root)
    manifest: dict[str, Any] = {"format": FORMAT, "sources": _states(root, files + folders)}
    for side, text in zip(SIDES, read_corpus(root), strict=True):
        shards = []
        for index, shard in enumerate(text.split(shard_bytes)):
            name = f"{side}-{index:05d}.bin"
            (partial / name).write_bytes(shard.numpy().data)
            shards.append((name, len(shard), zlib.crc32(shard.numpy().data)))
        counts = byte_counts(text).tolist()
        manifest[side] = {"shard_bytes": shard_bytes, "shards": shards, "byte_counts": counts}
    (partial / MANIFEST).write_text(json.dumps(manifest))
    return manifest


def _states(root: Path, paths: Iterable[str]) -> list[list[Any]]:
    """[path, size, time of modification] of each path, as JSON keeps them."""
    folder = os.open(root, os.O_RDONLY)  # short paths take half the time
    try:
        stats = ((path, os.stat(path, dir_fd=folder)) for path in paths)
        return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    finally:
        os.close(folder)


# ---------------------------------------------------------------------------------------------
# Measurement

CONTEXT, WORLD_SIZE, GLOBAL_BATCH = 128, 2, 8  # the demo's on the CPU
NUM_STEPS = 500  # of a run that is resumed


def start_ms(folder: Path) -> tuple[float, float]:
    """Milliseconds from a process's first call until its text is ready, and its first batch."""
    begin = time.perf_counter()
    text = open_corpus(folder).train
    ready = time.perf_counter()
    windows = Windows(text, CONTEXT)
    sampler = GlobalBatchSampler(len(windows), GLOBAL_BATCH, seed=0, rank=0, world_size=WORLD_SIZE)
    torch.stack([windows[index][0] for index in next(iter(sampler))])
    return (ready - begin) * 1e3, (time.perf_counter() - begin) * 1e3


def fresh_start_ms(folder: Path) -> tuple[float, float]:
    """start_ms() in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(start_ms, (folder,))


def order_hash(num_samples: int, parts: Iterable[tuple[int, int]]) -> str:
    """Of the samples of all ranks, by step and then by rank.

    Args:
        parts: (world size, steps) by turns; each goes on from the state of the one before.
    """
    digest = hashlib.sha256()
    state: dict[str, int] | None = None
    for world_size, num_steps in parts:
        ranks = [
            iter(
                GlobalBatchSampler(
                    num_samples, GLOBAL_BATCH, seed=0, rank=rank, world_size=world_size
                )
            )
            for rank in range(world_size)
        ]
        if state is not None:
            for batches in ranks:
                batches.load_state_dict(state)
        for _ in range(num_steps):
            for batches in ranks:
                digest.update(repr(next(batches))[1:-1].encode() + b", ")
        state = ranks[0].state_dict()
    return digest.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, help="on which disk to time (default: $TMPDIR)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    starts: list[tuple[float, ...]] = []  # a first start's two times, and a second start's
    with tempfile.TemporaryDirectory(prefix="rota-data-", dir=args.cache) as name:
        for repeat in range(args.repeats):
            folder = Path(name, str(repeat))
            first, second = (fresh_start_ms(folder) for _ in range(2))
            starts.append(first + second)
        corpus = open_corpus(Path(name, "0"))
    num_samples = len(Windows(corpus.train, CONTEXT))
    num_bytes = len(corpus.train) + len(corpus.held_out)
    print(
        f"{num_bytes / 1e6:.1f} MB, {num_samples} samples; {args.repeats} starts, min / p50 in ms"
    )
    columns = [(min(times), statistics.median(times)) for times in zip(*starts, strict=True)]
    for title, first, second in zip(
        ("text ready", "first batch"), columns, columns[2:], strict=False
    ):
        print(
            f"{title:>11}: first {first[0]:.1f} / {first[1]:.1f}, second {second[0]:.1f} / "
            f"{second[1]:.1f}, times faster {first[0] / second[0]:.1f} / {first[1] / second[1]:.1f}"
        )

    print(f"order of the first {2 * NUM_STEPS} global batches of {GLOBAL_BATCH}:")
    for world_size in (1, 2, 4):
        print(f"{world_size:>13} ranks: {order_hash(num_samples, [(world_size, 2 * NUM_STEPS)])}")
    print(f" 4, then 3 ranks: {order_hash(num_samples, [(4, NUM_STEPS), (3, NUM_STEPS)])}")


if __name__ == "__main__":
    main()
