"""rota.fsdp's collectives give the same bits on CUDA tensors as on CPU tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rota.fsdp
from on_gpu import DEVICE, Guarded, init, on_ranks
from oracle import assert_same, name_of, random_patterns
from ranks import Rank
from several_hosts import default_group

PART_ELEMS = (0, 1, 513, 20_001)
worlds = pytest.mark.parametrize("world_size", [1, 3], ids="ws{}".format)


@worlds
@on_ranks()
def test_cuda_all_gather_in_a_wire_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    init(rank)
    for dtype, wire in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.bfloat16, torch.float8_e4m3fn),
    ):
        comm = rota.fsdp.AllGather(wire)
        for elems in PART_ELEMS:
            case = f"{name_of(dtype)} in {name_of(wire)}, {elems}"
            own = random_patterns(rank.world_size, elems, dtype)[rank.rank]
            on_cpu = torch.zeros(rank.world_size * elems, dtype=dtype)
            on_gpu = Guarded(on_cpu)
            comm(on_cpu, own, default_group())
            part = on_gpu.tensor.narrow(0, rank.rank * elems, elems)
            part.copy_(own.to(DEVICE))
            work = comm(on_gpu.tensor, part, default_group(), async_op=True)
            assert work is not None
            work.wait()
            assert_same(on_gpu.get(case), on_cpu, case)


@worlds
@on_ranks()
def test_cuda_reduce_scatter_in_a_wire_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    init(rank)
    for wire in (torch.bfloat16, torch.float16):
        comm = rota.fsdp.ReduceScatter(wire)
        for elems in PART_ELEMS:
            for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
                case = f"{op} in {name_of(wire)}, {elems}"
                inputs = random_patterns(rank.world_size, rank.world_size * elems, torch.float32)
                on_cpu = torch.zeros(elems)
                on_gpu = Guarded(on_cpu)
                comm(on_cpu, inputs[rank.rank], default_group(), op)
                comm(on_gpu.tensor, inputs[rank.rank].to(DEVICE), default_group(), op)
                assert_same(on_gpu.get(case), on_cpu, case)
