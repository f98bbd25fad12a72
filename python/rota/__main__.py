"""`python -m rota`: the command line."""

from __future__ import annotations

import argparse
import sys

from rota import doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rota", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help=doctor.__doc__)
    parser.parse_args()
    return doctor.run()


if __name__ == "__main__":
    sys.exit(main())
