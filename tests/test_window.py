"""rota.Window: one-sided access between processes, of one host and of two.

tests/cpp/window_cases.cpp and remote_window_cases.cpp have the protocols.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rota
from heap import heap_bytes
from oracle import random_patterns
from ranks import Rank, check_error, error_of, on_ranks
from rota import _C
from rota.window import make_window
from several_hosts import (
    INTERLEAVED,
    ONE_BY_ONE,
    ONE_HOST,
    PAIR,
    TWO_BY_TWO,
    Layout,
    of_layouts,
    on_layout,
)

# ---- access --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["rota", "gloo"])
@of_layouts(ONE_HOST, TWO_BY_TWO, INTERLEAVED)
@on_layout()
def test_ranks_access_each_others_windows(rank: Rank, backend: str) -> None:
    """Every rank puts a row into every window, and reads all rows by get and view."""
    rank.init(backend)
    n, me, host_of = rank.world_size, rank.rank, rank.layout.host_of
    window = rota.Window((n, 1000), dtype=torch.int32, num_channels=2)
    assert (window.rank, window.world_size, window.tensor.shape) == (me, n, (n, 1000))
    for peer in range(n):
        strided = torch.full((2, 1000), 100 * me + peer, dtype=torch.int32).t()[:, :1]
        window.put(strided, peer, offset=1000 * me)
        window.signal(peer)
    for peer in range(n):
        window.wait_signal(peer)
        assert window.tensor[peer].eq(100 * peer + me).all()
        window.signal(peer)
    for peer in range(n):
        window.wait_signal(peer)
    for peer in range(n):
        row = torch.empty(500, 2, dtype=torch.int32)
        window.get(row.t(), peer, offset=1000 * me)
        assert row.eq(100 * me + peer).all()
        if host_of[peer] == host_of[me]:
            assert window.view(peer)[me].eq(100 * me + peer).all()
            window.view(peer)[me, 0] = -1
        else:  # whose memory cannot be mapped
            assert error_of(window.view, peer)[0] != "nothing"
        window.signal(peer, channel=1)
    for peer in range(n):
        window.wait_signal(peer, channel=1)
        assert (window.tensor[peer, 0] == -1) == (host_of[peer] == host_of[me])
    dist.barrier()  # a rank that returns closes its window


@on_layout(ONE_BY_ONE)
def test_long_accesses_to_another_host_are_whole(rank: Rank) -> None:
    """More than what is on its way at a time, to and from both ranks at once."""
    rank.init("gloo")
    n, peer = 3_000_001, 1 - rank.rank
    window = rota.Window(n + 1, dtype=torch.float32)
    mine = torch.arange(n, dtype=torch.float32) + 7 * rank.rank
    window.put(mine, peer, offset=1)
    got = torch.empty(n)
    window.get(got, peer, offset=1)
    assert torch.equal(got, mine)
    window.signal(peer)
    window.wait_signal(peer)
    assert torch.equal(window.tensor[1:], torch.arange(n) + 7.0 * peer)
    dist.barrier()
    for wire in (None, torch.float16):
        window.accumulate(torch.ones(n), peer, offset=1, wire_dtype=wire)
    dist.barrier()
    assert torch.equal(window.tensor[1:], torch.arange(n) + 7.0 * peer + 2)


@of_layouts(Layout((0, 0, 0, 0)), TWO_BY_TWO)
@on_layout()
def test_accumulate_sums_the_contributions_of_all_ranks(rank: Rank) -> None:
    rank.init()
    window = rota.Window(100_000, dtype=torch.float32)
    values = random_patterns(rank.world_size, 100_000, torch.float32)[rank.rank].nan_to_num(0, 1, 1)
    values = values.clamp(-1000, 1000).round()
    for _ in range(5):
        window.accumulate(values, 0)
    everyone = values.clone()
    dist.all_reduce(everyone)
    dist.barrier()
    if rank.rank == 0:
        assert torch.equal(window.tensor, 5 * everyone)
        window.tensor.zero_()
    dist.barrier()
    if rank.rank == rank.world_size - 1:
        small = torch.linspace(-3, 3, 1000)
        window.accumulate(small, 0, offset=500, wire_dtype=torch.bfloat16)
        got = torch.empty(1000)
        window.get(got, 0, offset=500)
        assert torch.equal(got, small.bfloat16().float())
        window.accumulate(small, 0, wire_dtype=torch.float8_e4m3fn, block_scaling=True)
    dist.barrier()


@of_layouts(ONE_HOST, Layout((0, 0, 1)))
@on_layout()
def test_windows_of_several_groups_do_not_meet(rank: Rank) -> None:
    rank.init()
    everyone = rota.Window(1, num_channels=3)
    pair = dist.new_group([1, 2])
    if rank.rank in (1, 2):
        mine = rota.Window(1, pair)
        assert mine.rank == rank.rank - 1
        mine.put(torch.full((1,), float(rank.rank)), 1 - mine.rank)
        mine.signal(1 - mine.rank)
        mine.wait_signal(1 - mine.rank)
        assert mine.tensor.item() == 3 - rank.rank
        everyone.signal(0, channel=2)
        return
    assert {everyone.wait_any_signal([1, 2], channel=2) for _ in range(2)} == {1, 2}
    assert everyone.num_signals(1, channel=2) == 0 == everyone.num_signals(1)


def window_threads(windows: list[rota.Window]) -> int:
    """How many serve other hosts; all have begun once every rank has answered."""
    for window in windows:
        for peer in range(window.world_size):
            window.signal(peer)
            window.wait_signal(peer)
    names = (Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return sum(name == "rota-window" for name in names)


@on_layout(TWO_BY_TWO)
def test_windows_of_a_group_share_threads(rank: Rank) -> None:
    """With an engine, a window has its own."""
    rank.init("gloo")
    windows = [rota.Window(1) for _ in range(3)]
    assert window_threads(windows) == 2  # the ranks of the other host
    engine = dist.new_group(backend="gloo")
    windows += [rota.Window(1, engine=engine) for _ in range(2)]
    assert window_threads(windows) == 4
    peer = (rank.rank + 2) % 4
    for number, window in enumerate(windows):
        window.put(torch.full((1,), float(number)), peer)
    dist.barrier()
    assert [window.tensor.item() for window in windows] == [0, 1, 2, 3, 4]
    windows[1].close()
    dist.barrier()
    for number in (0, 2, 3, 4):
        windows[number].put(torch.full((1,), 9.0), peer)
    dist.barrier()


@on_ranks(2)
def test_calls_with_parts_of_the_window_move_what_was_there(rank: Rank) -> None:
    rank.init()
    window = rota.Window(3000)
    peer = 1 - rank.rank
    for target in (rank.rank, peer):
        memory = window.view(target)
        for first, second in ((0, 1), (1, 0), (0, 700), (700, 0)):
            for call in ("put", "get", "accumulate"):
                dist.barrier()
                if rank.rank == 1:
                    memory.copy_(torch.arange(3000.0))
                    expected = memory.clone()
                    source, place = (first, second) if call != "get" else (second, first)
                    moved = expected[source : source + 2000].clone()
                    if call == "accumulate":
                        moved += expected[place : place + 2000]
                    expected[place : place + 2000] = moved
                    getattr(window, call)(memory[first : first + 2000], target, second)
                    assert memory.equal(expected), f"{call} from {first} to {second}"
                dist.barrier()


# ---- memory --------------------------------------------------------------------------------------


@on_ranks(2)
def test_window_without_elements(rank: Rank) -> None:
    rank.init()
    made = rota.empty(8)
    for made_of in (0, torch.empty(0), torch.empty(3, 0), rota.empty(0), made[8:]):
        window = rota.Window(made_of)
        peer = 1 - rank.rank
        window.put(torch.empty(0), peer)
        window.get(torch.empty(0), peer)
        assert window.view(peer).shape == window.tensor.shape
        window.signal(peer)
        window.wait_signal(peer)
        kind, text = error_of(partial(window.put, torch.ones(1), peer)) or ("", "")
        assert kind == "ValueError" and "which has 0" in text, text
    dist.barrier()


@on_ranks(2)
def test_window_of_ranks_without_a_group_has_its_tensor(rank: Rank) -> None:
    """As a backend makes torch's windows, without a process group."""
    tensor = torch.zeros(2)
    window = make_window(tensor, rank.make_store(), rank.rank, rank.world_size)
    assert window.tensor.data_ptr() == tensor.data_ptr()
    window.put(torch.ones(2), 1 - rank.rank)
    window.signal(1 - rank.rank)
    window.wait_signal(1 - rank.rank)
    assert window.tensor.tolist() == [1, 1]


@on_ranks(2)
def test_window_of_a_tensor_is_that_tensor(rank: Rank) -> None:
    rank.init()
    linear = torch.nn.Linear(40, 30)
    with torch.no_grad():
        linear.weight.fill_(rank.rank)
    window = rota.Window(linear.weight)
    view = linear.weight.detach()[3:5]
    assert linear.weight.eq(rank.rank).all()  # moved, with what it held
    dist.barrier()
    window.put(torch.full((40,), 7.0), 1 - rank.rank, offset=4 * 40)
    dist.barrier()
    assert linear.weight[4].eq(7).all() and view[1].eq(7).all() and view[0].eq(rank.rank).all()
    assert window.tensor.data_ptr() == linear.weight.data_ptr()

    # A part of rota.empty's memory, which collectives still read in place.
    part = rota.empty(3, 100_000)[1]
    before = part.data_ptr()
    window = rota.Window(part)
    assert window.tensor.data_ptr() == before
    part.fill_(1 + rank.rank)
    dist.all_reduce(part)
    dist.barrier()
    assert window.view(1 - rank.rank).eq(3).all()
    again = rota.Window(part)
    assert again.view(1 - rank.rank).eq(3).all()
    dist.barrier()


@on_ranks(2)
def test_closed_window_gives_its_memory_back(rank: Rank) -> None:
    rank.init()
    for _ in range(3):
        window = rota.Window(3 << 20, dtype=torch.uint8)
        view = window.view(1 - rank.rank)
        window.tensor.fill_(7)
        dist.barrier()
        window.close()
        del window
        dist.barrier()
        assert view.eq(7).all()  # also without its owner's tensor
        del view
        dist.barrier()
    while heap_bytes() >= 1 << 20:  # until it has noticed that nobody maps them any more
        time.sleep(0.001)
    kept = rota.empty(1000)
    window = rota.Window(kept)
    window.close()
    kept.fill_(1)


@on_ranks(2)
def test_memory_that_something_else_may_use_does_not_move(rank: Rank) -> None:
    rank.init()
    peer = 1 - rank.rank
    holders: dict[str, Callable[[torch.Tensor], object]] = {
        "a view": lambda t: t[2:],
        "detach": lambda t: t.detach(),
        "DLPack": torch.utils.dlpack.to_dlpack,
        "DLPack of a view": lambda t: torch.utils.dlpack.to_dlpack(t[2:]),
        "numpy": lambda t: t.numpy(),
        "isend": lambda t: dist.isend(t, peer),
        "irecv": lambda t: dist.irecv(t, peer, tag=1),
        "autograd": lambda t: torch.ones(300, requires_grad=True) * t,
    }
    for name, hold in holders.items():
        tensor = torch.arange(300.0)
        held = hold(tensor)
        where = tensor.data_ptr()
        raised, text = error_of(rota.Window, tensor)
        assert raised == "ValueError" and "rota.empty" in text, f"{name}: {raised}: {text}"
        place = rota.empty(1200, dtype=torch.uint8)
        assert not _C.move_storage(tensor, place, copies=True), name
        assert tensor.data_ptr() == where
        if name == "irecv":  # both ranks' messages end here
            dist.isend(torch.arange(300.0), peer, tag=1).wait()
            held.wait()
            assert tensor.equal(torch.arange(300.0))
        if name == "isend":
            dist.recv(torch.empty(300), peer)
            held.wait()
        del held
        if name != "numpy":  # torch does not hear of its end
            window = rota.Window(tensor)
            assert window.tensor.equal(torch.arange(300.0)) and tensor.data_ptr() != where
        dist.barrier()

    # A leaf is held by torch, as by DDP, and can be exported only through detach().
    leaf = torch.nn.Parameter(torch.ones(300))
    nodes = [leaf * 2]
    assert _C.move_storage(leaf, rota.empty(1200, dtype=torch.uint8), copies=True)
    alias = torch.utils.dlpack.to_dlpack(leaf.detach())
    assert not _C.move_storage(leaf, rota.empty(1200, dtype=torch.uint8), copies=True)
    del alias, nodes


# ---- bad input -----------------------------------------------------------------------------------


@of_layouts(ONE_HOST, Layout((0, 1, 1)))
@on_layout()
def test_ranks_that_disagree_all_raise(rank: Rank) -> None:
    rank.init()
    mine = rank.rank == 1
    for call, fact in (
        (
            lambda: rota.Window((2, 3) if mine else (3, 2)),
            "rank 0, 2 made (3, 2) of torch.float32, 1 channels; rank 1 made (2, 3)",
        ),
        (
            lambda: rota.Window(4, dtype=torch.int8 if mine else torch.uint8),
            "torch.uint8, 1 channels; rank 1 made (4,) of torch.int8",
        ),
        (lambda: rota.Window(4, num_channels=2 if mine else 1), ""),
    ):
        check_error(error_of(call), "Mismatch", fact)
    for call, fact in (
        (
            lambda: rota.Window(torch.ones(4, 4).t() if mine else torch.ones(4, 4)),
            "the tensor is strided",
        ),
        (
            lambda: rota.Window(torch.from_numpy(np.ones(4)) if mine else torch.ones(4)),
            "memory belongs to another library",
        ),
        (lambda: rota.Window(-1 if mine else 1), ""),
    ):
        kind, told = ("ValueError", "") if mine else ("TransportError", "rank 1 failed")
        check_error(error_of(call), kind, fact, told)


@of_layouts(PAIR, ONE_BY_ONE)
@on_layout()
def test_bad_arguments_are_refused(rank: Rank) -> None:
    rank.init()
    window = rota.Window(10)
    half = rota.Window(10, dtype=torch.float16)
    one = torch.zeros(1)
    soon: Any = 0.5
    for call, kind, text in (
        (lambda: window.put(one.double(), 0), "TypeError", "expected the window's, Float"),
        (lambda: window.put(one, 5), "ValueError", "the rank is 5, expected 0 to 1"),
        (lambda: window.put(one, 0, -1), "ValueError", "offset is -1"),
        (lambda: window.put(one, 0, 10), "ValueError", "rank 0's window"),
        (lambda: window.get(torch.zeros(11), 1), "ValueError", "rank 1's window"),
        (lambda: window.get(one, 1, 1 << 62), "ValueError", "rank 1's window"),
        (lambda: half.accumulate(one.half(), 1), "TypeError", "make it float32"),
        (lambda: window.accumulate(one, 1, 0, torch.int8), "TypeError", "wire_dtype"),
        (lambda: window.signal(0, channel=1), "ValueError", "the channel is 1"),
        (lambda: window.wait_signal(0, timeout=soon), "TypeError", "timeout is 0.5, expected a da"),
        (lambda: window.wait_any_signal([0], timeout=soon), "TypeError", "timeout is 0.5, expect"),
        (lambda: rota.Window(1, num_channels=0), "ValueError", "num_channels is 0"),
        (lambda: rota.Window(1, group="me"), "TypeError", "group is of type str"),
    ):
        check_error(error_of(call), kind, text)
    assert window.tensor.count_nonzero() == 0
    dist.barrier()


def test_window_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        rota.Window(1)


@on_layout(ONE_BY_ONE)
def test_engines_that_do_not_fit_are_refused(rank: Rank) -> None:
    rank.init("gloo")
    mine = rank.rank == 1
    engine, part = dist.new_group(backend="gloo"), dist.new_group([1])
    error = error_of(rota.Window, 1, engine=engine if mine else None)
    check_error(error, "Mismatch", "rank 0 has no engine; rank 1 has one of its own")
    error = error_of(rota.Window, 1, engine=part if mine else engine)
    kind = "ValueError" if mine else "TransportError"
    check_error(error, kind, "the engine is a group of 1 ranks")
    check_error(error_of(rota.Window, 1, engine=engine), "nothing")
