"""The heap behind rota.empty(), as the kernel shows it."""

from __future__ import annotations

import os
from pathlib import Path

HEAP = "memfd:rota-heap"


def heap_range() -> range:
    """The addresses of this process's heap; empty before its first tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if HEAP in line and " rw-s " in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            return range(begin, end)
    return range(0)


def heap_bytes() -> int:
    """The machine's memory that this process's heap uses."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.exists(path) and HEAP in os.readlink(path):
            return os.stat(path).st_blocks * 512
    return 0
