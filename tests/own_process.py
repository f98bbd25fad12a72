"""What this process holds at the moment, for tests that nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path

_SELF = Path("/proc/self")


def num_descriptors() -> int:
    return len(list((_SELF / "fd").iterdir()))


def num_threads() -> int:
    return len(list((_SELF / "task").iterdir()))


def num_mappings() -> int:
    return len((_SELF / "maps").read_text().splitlines())


def resident_bytes() -> int:
    pages = (_SELF / "statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
