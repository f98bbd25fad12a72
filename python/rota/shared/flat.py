"""A tensor's elements and bytes in their order, as they are written to shared memory."""

from __future__ import annotations

import torch


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements in their order, and nothing else."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in one dimension: its own memory if that is flat, else a copy."""
    values = tensor.resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous with any stride, which view() keeps and view(dtype) refuses.
    return values.as_strided((values.numel(),), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return flat_of(tensor).view(torch.uint8)
