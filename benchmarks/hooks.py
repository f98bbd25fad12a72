"""DDP communication hooks on one bucket: rota's compared with torch's hook of the same name.

    python benchmarks/hooks.py --hook fp16_compress_hook --sizes 25M,64M --ranks 2 -c

Times `hook(state, bucket).wait()` on a float32 bucket that DDP made, without a model. torch's hook
runs on Gloo and, to show the effect of the backend alone, on rota. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import driver
from arguments import Parser, add_bucket_sizes, add_common_arguments
from protocol import Entry

HOOKS = ("fp16_compress_hook", "bf16_compress_hook", "allreduce_hook")
ENTRIES = [
    Entry("rota hook", "rota", "rota hook"),
    Entry("torch hook on rota", "rota", "torch hook"),
    Entry("torch hook on gloo", "gloo", "torch hook"),
]


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--hook", choices=HOOKS, default=HOOKS[0], help="the hook (default: fp16_compress_hook)")
    add_bucket_sizes(parser)
    add_common_arguments(parser)
    parser.set_defaults(iters=10, warmup=2)  # a call takes tens of ms
    return parser.parse_args()


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: starts ranks, measures every size, prints, writes and sums up."""
    run = driver.Run("hooks", args.hook, args.ranks, args)
    if args.check and args.ranks.bit_count() != 1:
        run.note(f"averages over {args.ranks} ranks are not exact: results are not checked")

    measurements, group = driver.measure_buckets(run, args, ENTRIES, args.hook)
    return run.publish(measurements, [group], mpis=[])


def main() -> int:
    """Returns the exit status: 0 if everything was measured and no result was wrong."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
