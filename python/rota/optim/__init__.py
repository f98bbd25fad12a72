"""Optimizers that update each parameter where its gradients are summed; see docs/optim.md."""

from rota.optim.adam import Adam, AdamW
from rota.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
