"""rota.Window on GPUs. Always on simulated ones, where memory that its owner has freed faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import error_of
from simulated_processes import SimulatedProcesses, init_group
from test_cuda_teardown import FREED_TOO_EARLY, IPC, SYMMETRIC

WORLD_SIZE = 3


def access_each_other(rank: int, store_path: str) -> None:
    init_group(rank, WORLD_SIZE, store_path)
    window = rota.Window((WORLD_SIZE, 100), dtype=torch.int32, device="cuda")
    assert isinstance(window, rota.Window)
    assert window.tensor.device == torch.device("cuda", 0)
    assert window.tensor.cpu().eq(0).all() and window.tensor.shape == (WORLD_SIZE, 100)
    for peer in range(WORLD_SIZE):
        row = torch.full((100,), 10 * rank + peer, dtype=torch.int32)
        window.put(row if rank == 0 else row.cuda(), peer, offset=100 * rank)
        window.signal(peer)
    for peer in range(WORLD_SIZE):
        window.wait_signal(peer)
        assert window.tensor[peer].cpu().eq(10 * peer + rank).all()
    dist.barrier()
    for peer in range(WORLD_SIZE):
        on_gpu, on_cpu = (torch.empty(2, 50, dtype=torch.int32, device=d) for d in ("cuda", "cpu"))
        window.get(on_gpu, peer, offset=100 * rank)
        window.get(on_cpu, peer, offset=100 * rank)
        for got in (on_gpu.cpu(), on_cpu, window.view(peer)[rank].cpu()):
            assert got.eq(10 * rank + peer).all()
    dist.barrier()


@pytest.mark.parametrize("memory", [IPC, SYMMETRIC], ids=["ipc", "symmetric"])
def test_ranks_access_each_others_windows(
    memory: tuple[dict[str, str], str], processes: SimulatedProcesses, tmp_path: Path
) -> None:
    environment, _ = memory
    calls = [(access_each_other, (rank, f"{tmp_path}/store")) for rank in range(WORLD_SIZE)]
    processes.run_together(calls, **environment)


def close_before_the_others(rank: int, store_path: str) -> tuple[str, str] | None:
    """Rank 0 closes its window, which the others still map."""
    init_group(rank, WORLD_SIZE, store_path)
    window = rota.Window(1000, dtype=torch.float32, device="cuda")
    window.tensor.fill_(rank + 1.0)
    torch.cuda.synchronize()
    dist.barrier()
    view = window.view(0)
    if rank == 0:
        del view
        window.close()
        assert error_of(lambda: window.tensor) is not None
        del window
    dist.barrier()
    if rank == 0:
        dist.barrier()
        return None
    assert view.cpu().eq(1).all()
    error = error_of(lambda: window.put(torch.ones(1), 0))
    dist.barrier()
    return error


@pytest.mark.parametrize("memory", [IPC, SYMMETRIC], ids=["ipc", "symmetric"])
def test_memory_of_a_closed_window_stays_while_others_map_it(
    memory: tuple[dict[str, str], str], processes: SimulatedProcesses, tmp_path: Path
) -> None:
    environment, _ = memory
    calls = [(close_before_the_others, (rank, f"{tmp_path}/store")) for rank in range(WORLD_SIZE)]
    outcomes = processes.outcomes(calls, **environment)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD_SIZE
    for outcome in outcomes:
        assert FREED_TOO_EARLY not in outcome.stderr
    for outcome in outcomes[1:]:
        kind, text = outcome.value
        assert kind == "PeerFailed" and "rank 0" in text


def give_bad_input(rank: int, store_path: str) -> list[tuple[str, str] | None]:
    init_group(rank, 2, store_path)
    tensor = torch.ones(4).cuda()
    errors: list[Any] = [
        error_of(lambda: rota.Window(tensor, device="cuda")),
        error_of(lambda: rota.Window(4 + rank, device="cuda")),
        error_of(lambda: rota.Window(tensor)),
    ]
    window = rota.Window((2, 2), device="cuda")
    errors += [
        error_of(lambda: window.put(tensor, 1 - rank, offset=1)),
        error_of(lambda: window.get(torch.ones(4, dtype=torch.float64), 1 - rank)),
        error_of(lambda: window.accumulate(tensor, 1 - rank)),
        error_of(lambda: window.put(tensor, 2)),
    ]
    empty = rota.Window((0, 3), device="cuda")
    empty.put(torch.empty(0), 1 - rank)
    assert empty.view(1 - rank).shape == (0, 3)
    dist.barrier()
    return errors


def test_bad_input_is_refused(processes: SimulatedProcesses, tmp_path: Path) -> None:
    calls = [(give_bad_input, (rank, f"{tmp_path}/store")) for rank in range(2)]
    expected = [
        ("ValueError", "pass its shape"),
        ("Mismatch", "(4,) of torch.float32 on GPUs; rank 1 made (5,)"),
        ("ValueError", "cuda:0"),
        ("ValueError", "elements 1 to 5 of rank"),
        ("TypeError", "expected the window's, torch.float32"),
        ("TypeError", "no sums"),
        ("ValueError", "rank"),
    ]
    for errors in processes.run_together(calls):
        for (kind, text), (expected_kind, expected_text) in zip(errors, expected, strict=True):
            assert kind == expected_kind and expected_text in text, text
