"""How fast the GPU copies: the ceiling of everything that moves bytes.

    PYTHONPATH=python:benchmarks python3 -m gpu.copy_rate --sizes 1M,64M,1G

A size is that of the source; its copy reads and writes twice as many bytes. The last line of the
output is JSON.
"""

from __future__ import annotations

import sys
from functools import partial

from gpu import frame
from gpu.frame import Bench


def benchmark(bench: Bench) -> None:
    """A row for each size."""
    for num_bytes in bench.sizes:
        jobs = bench.attempt("copy", partial(bench.copy_job, 2 * num_bytes))
        bench.measure(jobs, "copy", num_bytes)


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "1M,16M,64M,256M,1G,2G", "4K,64K")
    return frame.main("copy_rate", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
