"""Checkpoints in the memory of other processes and hosts. See docs/checkpoint.md."""

from rota.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
