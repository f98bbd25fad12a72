"""rota.Window on GPUs: accesses between processes, and what it refuses."""

from __future__ import annotations

import torch
import torch.distributed as dist

import rota
from on_gpu import DEVICE, init, on_ranks
from ranks import Rank, check_error, error_of


@on_ranks(3)
def test_cuda_ranks_access_each_others_windows(ranks: Rank) -> None:
    init(ranks)
    rank, world_size = ranks.rank, ranks.world_size
    window = rota.Window((world_size, 100), dtype=torch.int32, device="cuda")
    assert isinstance(window, rota.Window)
    assert window.tensor.device == DEVICE
    assert window.tensor.cpu().eq(0).all() and window.tensor.shape == (world_size, 100)
    dist.barrier()
    for peer in range(world_size):
        row = torch.full((100,), 10 * rank + peer, dtype=torch.int32)
        window.put(row if rank == 0 else row.cuda(), peer, offset=100 * rank)
        window.signal(peer)
    for peer in range(world_size):
        window.wait_signal(peer)
        assert window.tensor[peer].cpu().eq(10 * peer + rank).all()
    dist.barrier()
    for peer in range(world_size):
        on_gpu, on_cpu = (torch.empty(2, 50, dtype=torch.int32, device=d) for d in ("cuda", "cpu"))
        window.get(on_gpu, peer, offset=100 * rank)
        window.get(on_cpu, peer, offset=100 * rank)
        for got in (on_gpu.cpu(), on_cpu, window.view(peer)[rank].cpu()):
            assert got.eq(10 * rank + peer).all()
    dist.barrier()


@on_ranks(2)
def test_cuda_bad_input_is_refused(ranks: Rank) -> None:
    init(ranks)
    rank = ranks.rank
    tensor = torch.ones(4).cuda()
    window = rota.Window((2, 2), device="cuda")
    other_shapes = "(4,) of torch.float32 on GPUs; rank 1 made (5,)"
    for call, kind, fact in (
        (lambda: rota.Window(tensor, device="cuda"), "ValueError", "pass its shape"),
        (lambda: rota.Window(4 + rank, device="cuda"), "Mismatch", other_shapes),
        (lambda: rota.Window(tensor), "ValueError", "cuda:0"),
        (lambda: window.put(tensor, 1 - rank, offset=1), "ValueError", "elements 1 to 5 of rank"),
        (
            lambda: window.get(torch.ones(4, dtype=torch.float64), 1 - rank),
            "TypeError",
            "expected the window's, torch.float32",
        ),
        (lambda: window.accumulate(tensor, 1 - rank), "TypeError", "no sums"),
        (lambda: window.put(tensor, 2), "ValueError", "rank"),
    ):
        check_error(error_of(call), kind, fact)
    empty = rota.Window((0, 3), device="cuda")
    empty.put(torch.empty(0), 1 - rank)
    assert empty.view(1 - rank).shape == (0, 3)
    dist.barrier()
