"""Checks what every rank's reduce_bucket gives in an order of sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

import rota
from bucket_oracle import Format, reduce_bucket
from oracle import assert_same, random_inputs

WIRES = Format(torch.float32, False), Format(torch.float16, True), Format(torch.bfloat16, False)


def check_bucket_sums(
    communicator: rota.Communicator,
    lengths: Iterable[int],
    algorithms: Iterable[str],
    order: dict[str, Any],
) -> None:
    """Collective. order: group_size=, or order= and num_shards=."""
    for wire, length in itertools.product(WIRES, lengths):
        inputs = random_inputs(communicator.world_size, length, torch.float32)
        expected = reduce_bucket(inputs, wire, divisor=8.0, **order)
        for algorithm in algorithms:
            bucket = inputs[communicator.rank].clone()
            communicator.reduce_bucket(
                bucket,
                torch.zeros(2, dtype=torch.float64),
                wire_dtype=wire.dtype,
                block_scaling=wire.block_scaling,
                divisor=8.0,
                algorithm=algorithm,
                **order,
            )
            assert_same(bucket, expected, f"{algorithm} {wire} {length} {order}")
