"""rota: fast, exact collectives for data- and pipeline-parallel PyTorch.

Importing it registers the torch.distributed backend "rota". See README.md.
"""

import importlib
from typing import TYPE_CHECKING

import rota_autoload
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError

try:
    from rota import amp, errors, ops  # noqa: F401  (rota._C looks its exceptions up in errors)
    from rota.backend import BackendOptions
    from rota.communicator import Communicator
    from rota.gradients.clipping import clip_grad_norm_
    from rota.gradients.hooks import (
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        fused_hook,
    )
    from rota.gradients.reduction import overlap_gradients, reduce_gradients
    from rota.gradients.state import HookState
    from rota.shards import LogicalShards
    from rota.shared.memory import empty
    from rota.window import Window
except AttributeError as error:
    if getattr(error.obj, "__name__", "") != "rota._C":
        raise
    raise ImportError(
        f"rota: the extension is older or newer than the Python files beside it: it has no "
        f"{error.name!r}; rebuild it: pip install --no-build-isolation -e ."
    ) from error

if TYPE_CHECKING:
    from rota import checkpoint, elastic, fsdp, gpu, local_sgd, optim, parameter_server, weights

__version__ = "0.1.0"
__all__ = [
    "BackendOptions",
    "Communicator",
    "HookState",
    "LogicalShards",
    "Mismatch",
    "PeerFailed",
    "RotaError",
    "Timeout",
    "TransportError",
    "Window",
    "allreduce_hook",
    "amp",
    "bf16_compress_hook",
    "checkpoint",
    "clip_grad_norm_",
    "elastic",
    "empty",
    "fp16_compress_hook",
    "fsdp",
    "fused_hook",
    "gpu",
    "local_sgd",
    "ops",
    "optim",
    "overlap_gradients",
    "parameter_server",
    "reduce_gradients",
    "weights",
]

rota_autoload.register()

# Imported when they are used, since most programs need none of them.
_SUBMODULES = (
    *("checkpoint", "elastic", "fsdp", "gpu", "local_sgd", "optim", "parameter_server", "weights"),
)
# Names of these submodules that users look for here, and where they are.
_PLACES = {
    "Checkpoint": "checkpoint",
    "DiLoCo": "local_sgd",
    "GradientBucket": "gpu",
    "LocalGroup": "gpu",
    "LocalSGD": "local_sgd",
    "ParameterServer": "parameter_server",
    "WeightShard": "weights",
    "WeightStore": "weights",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"rota.{name}")
    if name in _PLACES:
        raise AttributeError(f"rota.{name} is rota.{_PLACES[name]}.{name}")
    raise AttributeError(f"module 'rota' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
