"""DDP communication hooks on one bucket: rota's compared with torch's hook of the same name.

    python benchmarks/hooks.py --hook fp16_compress_hook --sizes 25M,64M --ranks 2 -c

Times `hook(state, bucket).wait()` on a float32 bucket that DDP made, without a model. torch's hook
runs on Gloo and, to show the effect of the backend alone, on rota. The last line of the output is
JSON.
"""

from __future__ import annotations

from arguments import FLOAT32_BYTES, Parser, add_bucket_sizes, add_common_arguments
from interleave import measure_sizes
from protocol import Entry
from record import Run
from torch_worker import start_torch_ranks
from workers import Workers

HOOKS = ("fp16_compress_hook", "bf16_compress_hook", "allreduce_hook")
ENTRIES = [
    Entry("rota hook", "rota", "rota hook"),
    Entry("torch hook on rota", "rota", "torch hook"),
    Entry("torch hook on gloo", "gloo", "torch hook"),
]


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--hook", choices=HOOKS, default=HOOKS[0])
    add_bucket_sizes(parser)
    add_common_arguments(parser)
    parser.set_defaults(iters=10, warmup=2)  # a call takes tens of ms
    args = parser.parse_args()

    with Run("hooks", args.ranks, args, args.hook) as run, Workers(args.timeout) as ranks:
        if args.check and args.ranks.bit_count() != 1:
            run.note(f"averages over {args.ranks} ranks are not exact: results are not checked")
        entries, versions = start_torch_ranks(ranks, run, args.ranks, ENTRIES)
        elems = [num_bytes // FLOAT32_BYTES for num_bytes in args.sizes]
        measurements = measure_sizes(
            entries, ranks.ask, args.hook, "float32", elems, FLOAT32_BYTES, args
        )
        run.publish(measurements, {"torch": versions})


if __name__ == "__main__":
    main()
