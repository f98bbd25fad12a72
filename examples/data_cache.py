"""The demo's text, and a memory-mapped cache of it that is built once per host.

    python examples/data_cache.py     # times two starts, prints the order's checksums

read_corpus() reads the text from the sources of Python's standard library, open_corpus() from the
cache. Nothing here communicates: processes agree through a lock on a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import sysconfig
import tempfile
import time
import zlib
from pathlib import Path

import torch
from data_order import GlobalBatchSampler, Windows
from torch import Tensor

STDLIB = Path(sysconfig.get_path("stdlib"))
# Third-party code, which is installed below the same folder, and compiled files.
NOT_READ = {"site-packages", "dist-packages", "__pycache__"}
FORMAT = 2  # of the cache, and of how read_corpus chooses and splits files


def find_sources(root: Path) -> list[str]:
    """The .py files below `root`, relative to it, in a fixed order."""
    files: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - NOT_READ
        relative = folder.removeprefix(str(root)).lstrip(os.sep)
        files += [os.path.join(relative, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.split(os.sep))


def read_corpus(root: Path = STDLIB) -> tuple[Tensor, Tensor]:
    """Every .py file of the standard library: (train, held_out), 1-D uint8. A file's path decides
    its side, so the split is the same wherever this Python is installed."""
    train, held_out = bytearray(), bytearray()
    for path in find_sources(root):
        side = held_out if zlib.crc32(path.encode()) % 10 == 0 else train
        side += (root / path).read_bytes()
    if min(len(train), len(held_out)) < 100_000:
        raise FileNotFoundError(f"found too few .py files under {root} to train on")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def crc32(text: Tensor) -> int:
    return zlib.crc32(text.numpy().data)


def default_folder() -> Path:
    """Where rota caches: $ROTA_CACHE_DIR, or else rota in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("ROTA_CACHE_DIR"):
        return Path(own)
    # The XDG base directory specification says to ignore relative paths.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "rota"


def open_corpus(folder: Path, root: Path = STDLIB) -> tuple[Tensor, Tensor]:
    """The text of read_corpus(), mapped from a file in `folder`, which is written if necessary.

    Processes that start together write it once: the others wait. It is written again if a source
    has changed (in size or time of modification), has come or gone, or if the file is damaged.
    Tensors that were opened before keep their text. Use a local disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"corpus-{zlib.crc32(str(root).encode()):08x}.pt"
    # States come first: what changes while the files are read makes this file a stale one.
    stats = [(source, (root / source).stat()) for source in find_sources(root)]
    sources = [FORMAT, *((source, stat.st_size, stat.st_mtime_ns) for source, stat in stats)]
    key = hashlib.sha256(repr(sources).encode()).hexdigest()
    with open(path.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            saved = torch.load(path, mmap=True)
            if saved["key"] == key and [*map(crc32, saved["text"])] == saved["crc32"]:
                return saved["text"][0], saved["text"][1]
        except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError):
            pass  # missing, or cut off
        text = read_corpus(root)
        partial = path.with_suffix(".partial")
        torch.save({"key": key, "text": text, "crc32": [*map(crc32, text)]}, partial)
        partial.rename(path)
        return text


def main() -> None:
    """Times a first and a second start, and prints that the order is the same for all ranks."""
    with tempfile.TemporaryDirectory(prefix="rota-data-") as folder:
        for start in ("first", "second"):
            begin = time.perf_counter()
            train, _ = open_corpus(Path(folder))
            print(f"{start} start: text ready after {(time.perf_counter() - begin) * 1e3:.1f} ms")
    windows = Windows(train, context=128)
    for world_size in (1, 2, 4):
        order = {"seed": 0, "world_size": world_size}
        ranks = [GlobalBatchSampler(len(windows), 8, rank=r, **order) for r in range(world_size)]
        steps = [[sample for batches in ranks for sample in next(batches)] for _ in range(1000)]
        print(f"order over {world_size} ranks: {zlib.crc32(repr(steps).encode()):08x}")


if __name__ == "__main__":
    main()
