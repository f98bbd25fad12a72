"""rota: fast, exact collectives for data- and pipeline-parallel PyTorch.

Importing it registers the torch.distributed backend "rota". See README.md.
"""

import importlib
from typing import TYPE_CHECKING

import rota_autoload
from rota import amp, errors, ops  # noqa: F401  (rota._C looks its exceptions up in errors)
from rota.backend import BackendOptions
from rota.clipping import clip_grad_norm_
from rota.communicator import Communicator
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError
from rota.fused import HookState, fused_hook
from rota.gpu import GradientBucket, LocalGroup
from rota.gradients import overlap_gradients, reduce_gradients
from rota.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from rota.local_sgd import DiLoCo, LocalSGD
from rota.memory import empty
from rota.parameter_server.server import ParameterServer
from rota.shards import LogicalShards
from rota.weights.layout import WeightShard
from rota.weights.store import WeightStore
from rota.window import Window

if TYPE_CHECKING:
    from rota import elastic, fsdp

__version__ = "0.1.0"
__all__ = [
    "BackendOptions",
    "Communicator",
    "DiLoCo",
    "GradientBucket",
    "HookState",
    "LocalGroup",
    "LocalSGD",
    "LogicalShards",
    "Mismatch",
    "ParameterServer",
    "PeerFailed",
    "RotaError",
    "Timeout",
    "TransportError",
    "WeightShard",
    "WeightStore",
    "Window",
    "allreduce_hook",
    "amp",
    "bf16_compress_hook",
    "clip_grad_norm_",
    "elastic",
    "empty",
    "fp16_compress_hook",
    "fsdp",
    "fused_hook",
    "ops",
    "overlap_gradients",
    "reduce_gradients",
]

rota_autoload.register()


def __getattr__(name: str) -> object:
    # torch.distributed.fsdp takes long to import, and most programs need neither.
    if name in ("elastic", "fsdp"):
        return importlib.import_module(f"rota.{name}")
    raise AttributeError(f"module 'rota' has no attribute {name!r}")
