"""Accuracy of averaged gradients: rota's fused hook and torch's hooks, compared with float64.

    python benchmarks/accuracy.py

Ranks are processes on this machine that average the gradients of gradient_sets.py. An element's
error is measured in float64, in units of rota's bound (error_bound.py); torch's hooks are also
judged by that bound, of one conversion each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradient_sets
import rota
from arguments import Parser
from error_bound import average_bound, exact_average, rota_wire
from hook_turn import make_bucket
from record import Run
from report import print_table
from workers import Workers

WORLD_SIZES = (2, 4, 8, 16)
MAX_RANKS = max(WORLD_SIZES)
RECORDED_STEPS = (0, 40)
# Ranks judge parts of the result that start at a block boundary for every block length.
PART_ELEMS = 256


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
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "worst" else mine + value)

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.error_squares / self.exact_squares)


Judged = tuple[str, str, int, Errors]  # set, hook, number of ranks, errors


def rank_main(pipe: Connection, rank: int, files: dict[str, Path], store: str) -> None:
    """One of MAX_RANKS processes: averages with the others, and sends the errors that it found.
    `files` are sets of gradients by name: float32, (MAX_RANKS, elements)."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, MAX_RANKS), rank=rank, world_size=MAX_RANKS
    )
    sets = {}
    for name, path in files.items():  # mapped: they are read when they are used
        num_elems = path.stat().st_size // 4
        values = torch.from_file(str(path), shared=False, size=num_elems, dtype=torch.float32)
        sets[name] = values.view(MAX_RANKS, -1)
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))
        if rank < world_size:
            pipe.send(list(judge_all(rank, world_size, group, sets)))


def judge_all(
    rank: int, world_size: int, group: dist.ProcessGroup, sets: dict[str, Tensor]
) -> Iterator[Judged]:
    """This rank's part of every average over `group`."""
    hooks = {hook: hook.over(group) for hook in HOOKS}
    for name, values in sets.items():
        contributions = values[:world_size]
        bucket = make_bucket(values.shape[1], group)
        part = part_of(rank, world_size, values.shape[1])
        parts = [contribution[part] for contribution in contributions]
        exact = exact_average(parts)
        for hook, average in hooks.items():
            bucket.buffer().copy_(contributions[rank])
            result = average(bucket)
            bound = average_bound(parts, rota_wire(hook.wire_dtype, hook.block_scaling))
            yield name, hook.label, world_size, Errors.of(result[part], exact, bound)


def part_of(rank: int, world_size: int, num_elems: int) -> slice:
    """The elements that a rank judges: all ranks have the same result."""
    part_elems = -(-num_elems // world_size // PART_ELEMS) * PART_ELEMS
    return slice(rank * part_elems, (rank + 1) * part_elems)


def finite(value: float) -> float | None:
    """`value` with four digits; None if infinite, which JSON cannot represent."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def row(name: str, label: str, num_ranks: int, errors: Errors) -> dict[str, Any]:
    """One row of the record; null means infinite."""
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


def print_errors(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    headings = [f"L2 of\n{num_ranks} ranks" for num_ranks in WORLD_SIZES]
    headings += ["worst/\nbound", "outside\nbound", "became\nInf", "became\n0", "Inf,\nNaN"]
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cells in rows:
        by_case.setdefault((cells["gradients"], cells["hook"]), []).append(cells)
    lines: list[Sequence[str] | None] = []
    for (name, label), cases in by_case.items():
        lost = sum(case["num_inf_or_nan_lost"] for case in cases)
        arrived = "-" if not cases[0]["num_inf_or_nan"] else "lost" if lost else "kept"
        lines.append(
            (
                f"{name}: {label}",
                *(text(case["relative_l2"]) for case in cases),
                text(worst(case["worst_over_bound"] for case in cases)),
                *(
                    count(sum(case[key] for case in cases))
                    for key in ("num_outside_bound", "num_became_inf", "num_became_zero")
                ),
                arrived,
            )
        )
        if label == HOOKS[-1].label:
            lines.append(None)
    print_table(console, "errors of averaged gradients", ("gradients: hook", *headings), lines)
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
    return "inf" if value is None else f"{value:.2g}"


def main() -> None:
    """Exits with 0 if all of rota's averages are within the bound."""
    parser = Parser(__doc__)
    parser.add_json()
    args = parser.parse_args()
    with Run("accuracy", MAX_RANKS, args) as run, Workers(timeout_s=3600) as ranks:
        sets = gradient_sets.recorded(MAX_RANKS, RECORDED_STEPS) | gradient_sets.made(MAX_RANKS)
        files = {name: ranks.folder / f"gradients{i}" for i, name in enumerate(sets)}
        for name, values in sets.items():
            values.numpy().tofile(files[name])
        del sets
        for rank in range(MAX_RANKS):
            ranks.fork(rank_main, rank, files, str(ranks.folder / "store"))
        errors: dict[tuple[str, str, int], Errors] = {}
        for world_size in WORLD_SIZES:
            for judged in ranks.recv_all(range(world_size)).values():
                for *case, part in judged:
                    errors.setdefault(tuple(case), Errors()).add(part)
        order = list(files)
        rows = [row(*case, total) for case, total in errors.items()]
        rows.sort(key=lambda row: order.index(row["gradients"]))
        print_errors(run.console, rows)
        ours = {hook.label for hook in HOOKS if hook.is_rota}
        num_wrong = sum(
            case["num_outside_bound"] + case["num_inf_or_nan_lost"]
            for case in rows
            if case["hook"] in ours
        )
        run.finish({"errors": rows}, num_wrong=num_wrong)


if __name__ == "__main__":
    main()
