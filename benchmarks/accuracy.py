"""Accuracy of averaged gradients: rota's fused hook and torch's hooks, compared with float64.

    python benchmarks/accuracy.py

Ranks are processes on this machine that average the gradients of gradient_sets.py. An element's
error is measured in float64, in units of rota's bound (error_bound.py); torch's hooks are also
judged by that bound, of one conversion each way. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import driver
import gradient_sets
from arguments import Parser
from error_bound import average_bound, exact_average, rota_wire
from hook_turn import make_bucket
from ranks import RankError

try:
    import rota
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

WORLD_SIZES = (2, 4, 8, 16)
MAX_RANKS = max(WORLD_SIZES)
RECORDED_STEPS = (0, 40)
# Ranks judge parts of the result that start at a block boundary for every block length.
PART_ELEMS = 256
CONTEXT = multiprocessing.get_context("forkserver")
# The first DistributedDataParallel imports torch._dynamo, which takes a second.
CONTEXT.set_forkserver_preload(["rota", "rich.table", "matplotlib.figure", "torch._dynamo"])


@dataclass(frozen=True)
class Hook:
    """A hook of rota or torch, and the wire format whose bound applies to it."""

    label: str
    is_rota: bool
    wire_dtype: torch.dtype
    block_scaling: bool

    def over(self, group: dist.ProcessGroup) -> Callable[[dist.GradBucket], Tensor]:
        """A function that averages a bucket over the ranks of `group`."""
        hook: Any
        state: Any
        if self.is_rota:
            hook = rota.fused_hook
            state = rota.HookState(group, self.wire_dtype, block_scaling=self.block_scaling)
        elif self.wire_dtype == torch.float16:
            hook, state = default_hooks.fp16_compress_hook, group
        else:
            hook, state = default_hooks.bf16_compress_hook, group
        return lambda bucket: hook(state, bucket).wait()


HOOKS = (
    Hook("rota float16", True, torch.float16, True),
    Hook("rota float16, unscaled", True, torch.float16, False),
    Hook("rota bfloat16", True, torch.bfloat16, False),
    Hook("rota float8_e4m3fn", True, torch.float8_e4m3fn, True),
    Hook("rota float8_e5m2", True, torch.float8_e5m2, True),
    Hook("torch fp16 hook", False, torch.float16, False),
    Hook("torch bf16 hook", False, torch.bfloat16, False),
)


@dataclass
class Errors:
    """The errors of an average, or of a part of it.

    Args:
        num_outside: elements further from the exact average than the bound.
        worst: largest error, in units of the bound.
        error_squares: sum over elements whose exact average is finite; inf where one is lost.
        exact_squares: likewise, of the exact average.
        num_to_inf: elements that are not finite though the exact average is.
        num_to_zero: elements that are zero though the exact average, in float32, is not.
        num_special: elements whose exact average is not finite.
        num_special_lost: those of them that are finite, or another infinity or NaN.
    """

    num_outside: int = 0
    worst: float = 0.0
    error_squares: float = 0.0
    exact_squares: float = 0.0
    num_to_inf: int = 0
    num_to_zero: int = 0
    num_special: int = 0
    num_special_lost: int = 0

    @classmethod
    def of(cls, result: Tensor, exact: Tensor, bound: Tensor) -> Errors:
        """Judges float32 results by exact averages and bounds in float64, all 1-D."""
        finite = exact.isfinite()
        error = (result.double() - exact).abs().where(finite, 0.0)
        error = error.where(error.isfinite(), math.inf)  # NaN
        promised = bound.isfinite()
        same = torch.where(exact.isnan(), result.isnan(), result == exact)
        return cls(
            num_outside=int((error > bound).sum()),
            worst=float((error / bound).where(promised, 0.0).max()),
            error_squares=float(error.square().sum()),
            exact_squares=float(exact.where(finite, 0.0).square().sum()),
            num_to_inf=int((finite & ~result.isfinite()).sum()),
            num_to_zero=int(((result == 0) & (exact.float() != 0)).sum()),
            num_special=int((~finite).sum()),
            num_special_lost=int((~finite & ~same).sum()),
        )

    def add(self, other: Errors) -> None:
        """Adds the errors of another part."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "worst" else mine + value)

    @property
    def relative_l2(self) -> float:
        """Norm of the error over the norm of the exact average."""
        return math.sqrt(self.error_squares / self.exact_squares)


@dataclass(frozen=True)
class GradientFile:
    """A set of gradients that ranks map: float32, (MAX_RANKS, num_elems)."""

    name: str
    path: str
    num_elems: int

    @classmethod
    def write(cls, name: str, values: Tensor, path: Path) -> GradientFile:
        """Writes `values` to `path`."""
        values.numpy().tofile(path)
        return cls(name, str(path), values.shape[1])

    def map(self) -> Tensor:
        """The values, mapped: they are read when they are used."""
        num_elems = MAX_RANKS * self.num_elems
        values = torch.from_file(self.path, shared=False, size=num_elems, dtype=torch.float32)
        return values.view(MAX_RANKS, self.num_elems)


Judged = tuple[str, str, int, Errors]  # set, hook, number of ranks, errors


def rank_main(rank: int, files: Sequence[GradientFile], store_path: str, pipe: Connection) -> None:
    """One of MAX_RANKS processes: averages with the others, and sends the errors that it found."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, MAX_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MAX_RANKS)
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))
        if rank < world_size:
            pipe.send(list(judge_all(rank, world_size, group, files)))
    dist.destroy_process_group()


def judge_all(
    rank: int, world_size: int, group: dist.ProcessGroup, files: Sequence[GradientFile]
) -> Iterator[Judged]:
    """This rank's part of every average over `group`."""
    hooks = {hook: hook.over(group) for hook in HOOKS}
    for file in files:
        contributions = file.map()[:world_size]
        bucket = make_bucket(file.num_elems, group)
        part = part_of(rank, world_size, file.num_elems)
        parts = [contribution[part] for contribution in contributions]
        exact = exact_average(parts)
        for hook, average in hooks.items():
            bucket.buffer().copy_(contributions[rank])
            result = average(bucket)
            bound = average_bound(parts, rota_wire(hook.wire_dtype, hook.block_scaling))
            yield file.name, hook.label, world_size, Errors.of(result[part], exact, bound)


def part_of(rank: int, world_size: int, num_elems: int) -> slice:
    """The elements that a rank judges: all ranks have the same result."""
    part_elems = -(-num_elems // world_size // PART_ELEMS) * PART_ELEMS
    return slice(rank * part_elems, (rank + 1) * part_elems)


def judge(files: Sequence[GradientFile], run_dir: Path) -> list[Judged]:
    """Starts the ranks, and merges their parts.

    Raises:
        RankError: a rank failed; it has printed why.
    """
    pipes, processes = [], []
    for rank in range(MAX_RANKS):
        pipe, rank_pipe = CONTEXT.Pipe(duplex=False)
        arguments = (rank, files, str(run_dir / "store"), rank_pipe)
        processes.append(CONTEXT.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        rank_pipe.close()
        pipes.append(pipe)
    errors: dict[tuple[str, str, int], Errors] = {}
    try:
        for world_size in WORLD_SIZES:
            for rank, pipe in enumerate(pipes[:world_size]):
                for name, label, num_ranks, part in receive(rank, pipe):
                    errors.setdefault((name, label, num_ranks), Errors()).add(part)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [(*key, total) for key, total in errors.items()]


def receive(rank: int, pipe: Connection) -> list[Judged]:
    """A rank's results over one group."""
    try:
        judged: list[Judged] = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} of {MAX_RANKS} died or failed") from None
    return judged


def finite(value: float) -> float | None:
    """`value` with four digits; None if infinite, which JSON cannot represent."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def row(judged: Judged) -> dict[str, Any]:
    """One row of the record; null means infinite."""
    name, label, num_ranks, errors = judged
    return {
        "gradients": name,
        "hook": label,
        "ranks": num_ranks,
        "num_outside_bound": errors.num_outside,
        "worst_over_bound": finite(errors.worst),
        "relative_l2": finite(errors.relative_l2),
        "num_became_inf": errors.num_to_inf,
        "num_became_zero": errors.num_to_zero,
        "num_inf_or_nan": errors.num_special,
        "num_inf_or_nan_lost": errors.num_special_lost,
    }


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per set and hook; counts are over all world sizes."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("gradients", no_wrap=True)
    table.add_column("hook", no_wrap=True)
    errors = [f"L2 of\n{num_ranks} ranks" for num_ranks in WORLD_SIZES]
    counts = ["outside\nbound", "became\nInf", "became\n0", "Inf,\nNaN"]
    for heading in (*errors, "worst/\nbound", *counts):
        table.add_column(heading, justify="right", no_wrap=True)
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cells in rows:
        by_case.setdefault((cells["gradients"], cells["hook"]), []).append(cells)
    previous = ""
    for (name, label), cases in by_case.items():
        if name != previous:
            table.add_row()
        lost = sum(case["num_inf_or_nan_lost"] for case in cases)
        arrived = "-" if not cases[0]["num_inf_or_nan"] else "lost" if lost else "kept"
        table.add_row(
            name if name != previous else "",
            label,
            *(text(case["relative_l2"]) for case in cases),
            text(worst(case["worst_over_bound"] for case in cases)),
            *(
                count(sum(case[key] for case in cases))
                for key in ("num_outside_bound", "num_became_inf", "num_became_zero")
            ),
            arrived,
        )
        previous = name
    console.print(table)
    console.print(
        "[dim]rota: its fused hook. L2: the error's norm over that of the exact average. Elements "
        "are counted over all numbers of ranks. The bound is that of one conversion of each "
        "contribution and one of the average; without block scaling, none beyond the wire dtype's "
        "range.[/dim]",
        soft_wrap=True,
    )


def worst(values: Iterable[float | None]) -> float | None:
    """The largest value; None, which means infinite, is larger than any."""
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)


def count(number: int) -> str:
    """`number` as the table shows it: 12, 3.4k, 5.6M."""
    if number < 1000:
        return str(number)
    return f"{number / 1e3:.3g}k" if number < 999_500 else f"{number / 1e6:.3g}M"


def text(value: float | None) -> str:
    """`value` as the table shows it."""
    return "inf" if value is None else f"{value:.2g}"


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: makes gradients, averages them, writes the record, prints and sums up."""
    run = driver.Run("accuracy", "accuracy", MAX_RANKS, args)
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        run_dir = Path(folder)
        sets = gradient_sets.recorded(MAX_RANKS, RECORDED_STEPS) | gradient_sets.made(MAX_RANKS)
        files = [
            GradientFile.write(name, values, run_dir / f"gradients{number}")
            for number, (name, values) in enumerate(sets.items())
        ]
        del sets
        judged = judge(files, run_dir)
    names = [file.name for file in files]
    rows = [row(case) for case in sorted(judged, key=lambda case: names.index(case[0]))]
    run.write_record({"errors": rows})
    print_table(run.console, rows)
    ours = {hook.label for hook in HOOKS if hook.is_rota}
    num_wrong = sum(
        case["num_outside_bound"] + case["num_inf_or_nan_lost"]
        for case in rows
        if case["hook"] in ours
    )
    return {"benchmark": "accuracy", "json": str(run.json_path), "num_wrong": num_wrong}


def main() -> int:
    """The exit status: 0 if all of rota's averages are within the bound."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # loopback, to work without a network
    sys.exit(main())
