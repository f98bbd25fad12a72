"""Training that goes on while processes come and go. See docs/elastic.md."""

from rota.elastic.generation import Generation
from rota.elastic.handles import Handle
from rota.elastic.membership import Finished, Membership
from rota.elastic.reservation import Reservation
from rota.elastic.state import RandomState, State

__all__ = [
    "Finished",
    "Generation",
    "Handle",
    "Membership",
    "RandomState",
    "Reservation",
    "State",
]
