"""Weights that trainers publish and readers of the same host pull. See docs/weights.md."""

from rota.weights.layout import WeightShard
from rota.weights.store import WeightStore

__all__ = ["WeightShard", "WeightStore"]
