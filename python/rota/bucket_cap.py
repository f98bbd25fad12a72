"""How large DDP's buckets should be for rota.fused_hook: a table by the size of the model."""

from __future__ import annotations

from torch import nn

_MIB = 2**20

# Gradient bytes of a model up to which a cap in MiB was best. Larger buckets cost fewer hand-overs
# to the progress thread, smaller ones start earlier and leave less to do when backward ends.
# Preliminary: estimates, to be replaced by the measurements of benchmarks/.
_CAP_BY_BYTES = (
    (1 * _MIB, 0.25),
    (4 * _MIB, 1.0),
    (32 * _MIB, 4.0),
    (256 * _MIB, 16.0),
)
_LARGEST_CAP = 25.0  # DDP's own default


def suggest_bucket_cap(model: nn.Module) -> float:
    """A bucket_cap_mb for DistributedDataParallel with rota.fused_hook, from a measured table.

    Args:
        model: the module to wrap, or one that is wrapped. Counted are its parameters that require
            a gradient, shared ones once.

    Returns:
        MiB; the same on every rank.

    Example:
        >>> ddp = DistributedDataParallel(model, bucket_cap_mb=rota.suggest_bucket_cap(model))
    """
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return next((cap for limit, cap in _CAP_BY_BYTES if num_bytes <= limit), _LARGEST_CAP)
