"""Training that goes on while processes come and go. See docs/checkpoint.md."""

from rota.elastic.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
