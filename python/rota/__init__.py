"""rota: fast, exact collectives for data- and pipeline-parallel PyTorch.

Importing it registers the torch.distributed backend "rota". See README.md.
"""

from rota import amp, errors, ops  # noqa: F401  (rota._C looks its exceptions up in errors)
from rota.backend import BackendOptions
from rota.backend import register as _register_backend
from rota.clipping import clip_grad_norm_
from rota.communicator import Communicator
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError
from rota.fused import HookState, fused_hook
from rota.gpu import GradientBucket, LocalGroup
from rota.gradients import overlap_gradients, reduce_gradients
from rota.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from rota.memory import empty

__version__ = "0.1.0"
__all__ = [
    "BackendOptions",
    "Communicator",
    "GradientBucket",
    "HookState",
    "LocalGroup",
    "Mismatch",
    "PeerFailed",
    "RotaError",
    "Timeout",
    "TransportError",
    "allreduce_hook",
    "amp",
    "bf16_compress_hook",
    "clip_grad_norm_",
    "empty",
    "fp16_compress_hook",
    "fused_hook",
    "ops",
    "overlap_gradients",
    "reduce_gradients",
]

_register_backend()
