"""The exact inputs and results of exact.py on torch tensors."""

from __future__ import annotations

import torch

import exact


def spread(tile: torch.Tensor, num_elems: int) -> torch.Tensor:
    """`tile` repeated to a length of `num_elems`."""
    return tile.repeat(-(-num_elems // tile.numel()))[:num_elems]


def fill_with_input(
    buffer: torch.Tensor,
    rank: int,
    world_size: int,
    seed: int,
    num_parts: int = 1,
    max_sum: int = exact.MAX_SUM,
) -> None:
    """Writes the contribution of `rank`, the same in each of num_parts equal parts."""
    tile = torch.from_numpy(exact.input_tile(rank, world_size, seed, max_sum))
    tile = tile.to(buffer.device, buffer.dtype)
    for part in buffer.chunk(num_parts):
        part.copy_(spread(tile, part.numel()))


def count_wrong(
    result: torch.Tensor,
    op: str,
    world_size: int,
    seed: int,
    divisor: int = 1,
    max_sum: int = exact.MAX_SUM,
) -> int:
    """Counts elements of `result` that differ from the exact result of `op` over `divisor`."""
    tiles = exact.expected_tiles(op, world_size, seed, max_sum)
    num_wrong = 0
    for part, tile in zip(result.chunk(len(tiles)), tiles, strict=True):
        expected = (torch.from_numpy(tile) / divisor).to(part.device, part.dtype)
        num_wrong += int((part != spread(expected, part.numel())).sum())
    return num_wrong
