"""Tests of torch's suite that no third party's backend can pass, with the line of torch at fault.

The line is looked up in the installed torch, and a test counts as excluded only while torch has
the line and the test fails with its error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Exclusion:
    file: str  # in torch's folder
    line: str
    error: str  # part of the error that it causes

    def find(self, torch_folder: Path) -> str:
        """File, number and text of the line in the installed torch.

        Raises: ValueError if torch does not have the line.
        """
        lines = (torch_folder / self.file).read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            if line.strip() == self.line:
                return f"{Path(self.file).name}:{number} `{self.line}`"
        raise ValueError(f"{self.file} of this torch has no line {self.line!r}")


# dist.monitored_barrier asks for the backend's name before it asks the backend.
_MONITORED_BARRIER = Exclusion(
    "distributed/distributed_c10d.py",
    "if get_backend(group) != Backend.GLOO:",
    "monitored_barrier is only implemented for GLOO backend",
)

EXCLUSIONS = {
    # DDP's log has the name of the BackendType, which all third parties share.
    "test_ddp_logging_data_cpu": Exclusion(
        "include/torch/csrc/distributed/c10d/ProcessGroup.hpp",
        'return "custom";',
        "'custom' != ",
    ),
    "test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
}
