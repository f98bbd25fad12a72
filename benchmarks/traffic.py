"""Memory traffic of a mixed-precision turn: bytes read and written per gradient element and rank.

Calculated, not measured: each pass over the bucket counts in full, without cache hits, and writes
cause no reads. Gradients are float32 and lie in the bucket (gradient_as_bucket_view=True; otherwise
DDP copies them there and back, which is 16 bytes more). An optimiser that applies clip_grad_norm_'s
factor writes the gradient back in its own pass: 4 bytes more, which are not counted here.
"""

from __future__ import annotations

GRADIENT = 4
# GradScaler.unscale_ multiplies in place; clip_grad_norm_ reads for the norm, then multiplies.
CLIP = 2 * GRADIENT
TORCH_AMP = 2 * GRADIENT + GRADIENT + CLIP


def torch_hook(wire: int, all_reduce: float) -> float:
    """Casts, divides in place, reduces and casts back; `wire` is the bytes of a cast element."""
    return (GRADIENT + wire) + 2 * wire + all_reduce + (wire + GRADIENT)


def gloo_all_reduce(elem: int, num_ranks: int) -> float:
    """Reduce-scatter, then all-gather, around a ring of sockets: the sender copies into the socket,
    the receiver copies out, and in the first phase adds the received data to its own."""
    passed = elem * (num_ranks - 1) / num_ranks
    return 2 * (2 + 2) * passed + 3 * passed


def rota_all_reduce(elem: int, num_ranks: int) -> float:
    """two_shot without conversion: a rank copies the others' shards into its slot, sums its own
    shard from its bucket and all slots into both, and copies the others' sums out."""
    others = elem * (num_ranks - 1) / num_ranks
    return 2 * others + (elem + elem) + 2 * others


def rota_fused(wire: float, num_ranks: int) -> float:
    """two_shot with a conversion each way: a rank encodes the others' shards into its slot, sums
    its own shard from its bucket and the others' slots into both, and decodes the others' sums.
    `wire` is the bytes of an encoded element, including its share of the block's scale."""
    others = wire * (num_ranks - 1) / num_ranks
    return GRADIENT + others + (others + others) + others + GRADIENT
