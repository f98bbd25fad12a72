"""How DDP lays a gradient in a flat bucket."""

from __future__ import annotations

import torch

from rota.sharding import local_of


def num_reals(parameter: torch.Tensor) -> int:
    """The parameter's number of elements in the bucket: those on this rank, complex ones twice."""
    return local_of(parameter).numel() * (2 if parameter.is_complex() else 1)


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of a parameter's part of a bucket with the shape of what this rank holds of it.

    DDP lays a gradient out like its parameter if that fills its memory densely, else contiguously.
    """
    local = local_of(parameter)
    if local.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if torch.ops.aten.is_non_overlapping_and_dense(local):
        return flat.as_strided(local.size(), local.stride())
    return flat.view(local.size())
