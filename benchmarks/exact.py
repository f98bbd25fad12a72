"""Inputs whose sums are exact in every dtype, and their expected results.

Values are small integers, so sums over ranks are exact even in float16, bfloat16 and int8, and
results are compared without a tolerance. numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tile = npt.NDArray[np.int64]

# Prime, so that a misplaced chunk is detected (chunk sizes are mostly powers of two).
PERIOD = 1021

# The largest sum that int8 can hold; bfloat16 and float16 also hold it exactly.
MAX_SUM = 127
# The integers up to here are exact in float8_e4m3fn, and up to half of it in float8_e5m2.
MAX_FLOAT8_SUM = 16


def input_tile(rank: int, world_size: int, seed: int, max_sum: int = MAX_SUM) -> Tile:
    """The contribution of `rank`, to be repeated over its buffer: PERIOD values in [1, 16].

    Never 0, so that memory that was never written counts as wrong. Sums are at most `max_sum`, or
    `world_size` where that is more.
    """
    max_value = max(1, min(16, max_sum // world_size))
    return np.random.default_rng((seed, rank)).integers(1, max_value, PERIOD, endpoint=True)


def expected_tiles(op: str, world_size: int, seed: int, max_sum: int = MAX_SUM) -> list[Tile]:
    """The result of `op` on a rank that gets one, as tiles.

    The result has as many equal parts as there are tiles; each part is its tile, repeated. An input
    with a part for each rank has the same tile in all of them.
    """
    tiles = [input_tile(rank, world_size, seed, max_sum) for rank in range(world_size)]
    match op:
        case "all_reduce" | "reduce" | "reduce_scatter":
            return [np.sum(tiles, axis=0)]
        case "broadcast" | "scatter" | "send_recv" | "one_way":
            return tiles[:1]
        case "all_gather" | "gather" | "all_to_all":
            return tiles
    raise ValueError(f"{op} has no result to check")
