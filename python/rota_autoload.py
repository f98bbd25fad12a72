"""Registers the torch.distributed backend "rota" for programs that do not import rota.

torch finds `register` by the entry points in pyproject.toml. It runs whenever torch is imported, in
programs that never use rota too, so this module stands outside the package, whose import takes a
tenth of a second. It imports torch only in functions: where `import rota` comes first and so
imports torch, torch looks for `register` in this module before its own import ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota._C import ProcessGroupRota
    from rota._torch import GroupOptions


def _create(options: GroupOptions, given: object) -> ProcessGroupRota:
    from rota.backend import create

    if not getattr(options, "enable_reconfigure", False):  # from torch 2.15 on
        return create(options, given, None)
    from rota.elastic.group_members import GroupMembers

    return create(options, given, GroupMembers)


def register() -> None:
    """Registers the backend, for CPU and CUDA tensors; rota is imported when a group is made."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "ROTA"):
        dist.Backend.register_backend("rota", _create, extended_api=True, devices=["cpu", "cuda"])
