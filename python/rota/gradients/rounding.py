"""The seeds of stochastic rounding."""

from __future__ import annotations


def split_mix_64(seed: int, index: int) -> int:
    """Output number `index` of the generator SplitMix64 that starts from `seed`."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
