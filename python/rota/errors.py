"""The exceptions of rota. Wrong arguments raise ValueError or TypeError instead."""

from torch.distributed import DistBackendError


class RotaError(DistBackendError):
    """Something in rota failed; every later use of a failed group raises it, too."""


class PeerFailed(RotaError):
    """A peer died, left the group, or raised; the text names its rank, pid, epoch and phase."""


class Timeout(RotaError):
    """A peer did not arrive within the group's timeout; the text names it and the phase."""


class Mismatch(RotaError):
    """Ranks called different collectives; the text names them, and no output was written."""


class TransportError(RotaError):
    """Shared memory or the connection between ranks could not be set up."""
