"""Training that goes on while processes come and go. See docs/elastic.md."""

from rota.elastic.generation import Generation
from rota.elastic.membership import Finished, Membership
from rota.elastic.reservation import Reservation
from rota.elastic.state import RandomState, State
from rota.shared.liveness import Handle

__all__ = [
    "Finished",
    "Generation",
    "Handle",
    "Membership",
    "RandomState",
    "Reservation",
    "State",
]


def __getattr__(name: str) -> object:
    if name == "Checkpoint":
        raise AttributeError("rota.elastic.Checkpoint is rota.checkpoint.Checkpoint")
    raise AttributeError(f"module 'rota.elastic' has no attribute {name!r}")
