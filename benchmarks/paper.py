"""The data that a collective on GPUs moves, from the closed formulas of csrc/schedule/cost.h.

    python benchmarks/paper.py --ranks 8 --dtype float16

Bytes of the busiest rank over its links and in its memory, per element of a tensor; messages and
waits of one round. Partial sums travel in the accumulate dtype. Nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from arguments import FLOAT32_BYTES, Parser, parse_natural
from rota._C import schedule

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def table(num_ranks: int, dtype: str) -> str:
    """A Markdown table. hierarchical uses two groups, if num_ranks is even."""
    header = [f"{num_ranks} ranks, {dtype}", "links out", "links in", "memory read"]
    header += ["memory written", "messages", "waits in a row"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    num_groups = 2 if num_ranks % 2 == 0 else 1
    elem_bytes = DTYPES[dtype].itemsize
    for name in schedule.COST_NAMES:
        cost = schedule.cost(
            name,
            tensor=elem_bytes,
            wire=elem_bytes,
            hop=max(elem_bytes, FLOAT32_BYTES),
            world_size=num_ranks,
            group_size=num_ranks // num_groups,
        )
        links = (cost.links_out_bytes, cost.links_in_bytes)
        numbers = (*links, cost.memory_read_bytes, cost.memory_written_bytes)
        label = f"{name}, {num_groups} groups" if name == "hierarchical" else name
        rows.append([label, *(f"{number:.3g}" for number in numbers)])
        rows[-1] += [str(cost.num_messages), str(cost.num_waits)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=parse_natural(2), default=8, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="default: %(default)s")
    args = parser.parse_args(argv)
    print(table(args.ranks, args.dtype))


if __name__ == "__main__":
    main(sys.argv[1:])
