"""rota: fast, exact collectives for data- and pipeline-parallel PyTorch.

Importing it registers the torch.distributed backend "rota". See README.md.
"""

from rota import errors  # noqa: F401  (rota._C looks its exceptions up there)
from rota.backend import register as _register_backend
from rota.communicator import Communicator
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError
from rota.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook

__version__ = "0.1.0"
__all__ = [
    "Communicator",
    "Mismatch",
    "PeerFailed",
    "RotaError",
    "Timeout",
    "TransportError",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
]

_register_backend()
