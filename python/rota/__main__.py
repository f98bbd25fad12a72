"""`python -m rota`: the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rota.doctor import gpu, hosts, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rota", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_doctor = commands.add_parser("doctor", help=report.__doc__, description=report.__doc__)
    of_doctor.add_argument(
        "--gpu",
        action="store_true",
        help="test every kernel on the first visible GPU, and write a record",
    )
    of_doctor.add_argument(
        "--hosts",
        action="store_true",
        help="on every rank of a job (torchrun): print who shares a host, and how fast it is",
    )
    of_doctor.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the record of --gpu (default: .)"
    )
    options = parser.parse_args()
    if not options.gpu and options.output is not None:
        of_doctor.error("--output is for --gpu")
    if options.gpu and options.hosts:
        of_doctor.error("--gpu and --hosts are two runs")
    if options.hosts:
        return hosts.run()
    if options.gpu:
        return gpu.run(options.output or Path())
    return report.run()


if __name__ == "__main__":
    sys.exit(main())
