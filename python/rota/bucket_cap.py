"""How large DDP's buckets should be for rota.fused_hook: a measured table, by size of the model."""

from __future__ import annotations

import math

from torch import nn

# MiB of gradients: ms of a step by bucket_cap_mb. Xeon with 2 cores, 2 ranks, 2026-11-21,
# `benchmarks/bucket_cap.py`. Each bucket costs a hand-over to the progress thread, and where every
# core has a rank, communication hides behind no computation: few large buckets are best. A machine
# with cores to spare was not measured.
_STEP_MS = {
    12.5: {1: 135.2, 2: 132.6, 4: 131.1, 8: 131.4, 16: 129.5, 25: 129.2, 50: 128.0, 100: 129.8},
    32.1: {1: 81.1, 2: 79.7, 4: 78.6, 8: 77.1, 16: 77.9, 25: 77.3, 50: 76.9, 100: 77.8},
    64.0: {1: 79.8, 2: 79.3, 4: 79.0, 8: 79.5, 16: 80.3, 25: 77.9, 50: 77.0, 100: 77.2},
}


def suggest_bucket_cap(model: nn.Module) -> float:
    """A bucket_cap_mb for DistributedDataParallel with rota.fused_hook, from a measured table.

    Args:
        model: the module to wrap, or one that is wrapped. Counted are its parameters that require
            a gradient, shared ones once.

    Returns:
        MiB: the cap that was best for the model of the table that is nearest in size, on a
        logarithmic scale; the same on every rank.

    Example:
        >>> ddp = DistributedDataParallel(model, bucket_cap_mb=rota.suggest_bucket_cap(model))
    """
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    num_mib = max(num_bytes, 1) / 2**20
    nearest = min(_STEP_MS, key=lambda measured: abs(math.log(measured / num_mib)))
    step_ms = _STEP_MS[nearest]
    return float(min(step_ms, key=lambda cap: step_ms[cap]))
