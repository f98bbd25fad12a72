"""rota.Window where a rank dies, closes early, is slow, is interrupted or forks."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import rota
from hosts import Hosts
from ranks import Rank, Ranks, check_error, error_of
from several_hosts import ONE_BY_ONE, PAIR, TWO_BY_TWO, Layout, of_layouts, on_layout
from test_interrupts import run_in_child

SHORT = timedelta(milliseconds=200)


def outlive_rank_2(rank: Rank) -> None:
    rank.init("gloo")
    window = rota.Window(10)
    window.tensor.fill_(rank.rank)
    window.signal(0)
    dist.barrier()
    rank.tell()
    if rank.rank == 2:
        window.wait_signal(2)
    if rank.rank != 0:
        window.wait_signal(0)
        window.put(torch.ones(1), 0, offset=rank.rank)
        window.signal(0)
        window.wait_signal(0)
        return
    for peer in (1, 2, 3):
        window.wait_signal(peer)  # rank 2's was sent before
    is_near = rank.layout.host_of[2] == 0
    facts = [f"rank 2 (pid {rank.pid_of(2)})" if is_near else "rank 2 on host 1"]
    facts.append("has died" if is_near else "has died or left")
    error = error_of(window.wait_signal, 2)
    in_vain = "rota.Window.wait_signal: rank 0/4 waits in vain"
    check_error(error, "PeerFailed", in_vain, *facts[: 2 - is_near])  # on one host: ended or closed
    assert [window.is_alive(peer) for peer in range(4)] == [True, True, False, True]
    # The kernel takes milliseconds to end a process, in which its memory is still written.
    while error_of(window.put, torch.full((1,), 2.0), 2)[0] == "nothing":
        pass
    one, got = torch.ones(1), torch.empty(10)
    for call in (window.put, window.accumulate):
        check_error(error_of(call, one, 2), "PeerFailed", *facts)
    check_error(error_of(window.signal, 2), "PeerFailed", *facts)
    if is_near:  # its memory can still be read
        window.get(got, 2)
        assert got.eq(2).all() and window.view(2).eq(2).all()
    else:
        check_error(error_of(window.get, got, 2), "PeerFailed", *facts)
    for peer in (1, 3):
        window.signal(peer)
    assert {window.wait_any_signal([2, 3, 1]) for _ in range(2)} == {1, 3}
    assert window.tensor.tolist()[:4] == [0, 1, 0, 1]
    for peer in (1, 3):
        window.signal(peer)


@of_layouts(Layout((0, 0, 0, 0)), TWO_BY_TWO)
def test_killed_rank_is_named_and_the_others_go_on(layout: Layout) -> None:
    with layout.start(outlive_rank_2) as ranks:
        ranks.results_without(2)


@of_layouts(PAIR, ONE_BY_ONE)
@on_layout()
def test_closed_window_is_refused_on_both_sides(rank: Rank) -> None:
    rank.init()
    window = rota.Window(10)
    dist.barrier()
    one = torch.zeros(1)
    if rank.rank == 1:
        window.close()
        window.close()
        dist.barrier()
        closed = "this window is closed; make a new one"
        check_error(error_of(window.put, one, 0), "RotaError", closed)
        check_error(error_of(window.wait_signal, 0), "RotaError")
        check_error(error_of(window.view, 1), "RotaError")
        return
    dist.barrier()
    name = "rank 1 (pid " if rank.layout == PAIR else "rank 1 on host 1"
    error = error_of(window.put, one, 1)
    check_error(error, "PeerFailed", name, "has closed its window")
    check_error(error_of(window.get, one, 1), "PeerFailed")
    check_error(error_of(window.wait_signal, 1), "PeerFailed")


def put_over_a_slow_link(rank: Rank) -> None:
    rank.init("gloo")
    window = rota.Window(250_000)
    dist.barrier()
    values = torch.full((250_000,), float(rank.rank))
    window.put(values, 1 - rank.rank)
    window.signal(1 - rank.rank)
    window.wait_signal(1 - rank.rank)
    assert window.tensor.eq(1 - rank.rank).all()


def test_host_behind_a_slow_link_is_not_lost() -> None:
    """The link takes 2 s for 1 MB, and more than the silence for a packet that suits a fast one."""
    silence = {"ROTA_HOST_SILENCE_MS": "700"}
    with Hosts((1, 1), "4mbit") as hosts:
        hosts.run(put_over_a_slow_link, env=silence)


def make_another_after_a_silence(rank: Rank) -> None:
    rank.init("gloo")
    window = rota.Window(1)
    rank.tell()
    rank.hear()
    if rank.rank == 0:
        error = error_of(window.wait_signal, 1)
        check_error(error, "PeerFailed", "rank 1 on host 1", "has given no sign of life")
        rank.tell()
    another = rota.Window(1)
    another.put(torch.full((1,), 3.0), 1 - rank.rank)
    another.signal(1 - rank.rank)
    another.wait_signal(1 - rank.rank)
    assert another.tensor.item() == 3
    dist.barrier()


def test_rank_that_was_given_up_is_reached_by_a_new_window() -> None:
    silence = {"ROTA_HOST_SILENCE_MS": "500"}
    with ONE_BY_ONE.start(make_another_after_a_silence, env=silence) as ranks:
        ranks.hear_all()
        ranks.kill(1, signal.SIGSTOP)
        ranks.tell(0)
        ranks.hear(0)
        ranks.kill(1, signal.SIGCONT)
        ranks.tell(1)
        ranks.results()


def wait_for_a_host_that_vanishes(rank: Rank) -> None:
    del os.environ["ROTA_HOST_SILENCE_MS"]
    rank.init("gloo")
    window = rota.Window(1 << 20)
    dist.barrier()
    rank.tell()
    rank.hear()
    peer = 1 - rank.rank
    facts = ("has given no sign of life", f"rank {peer} on host {peer}")
    check_error(error_of(window.wait_signal, peer), "PeerFailed", *facts)
    check_error(error_of(window.get, torch.empty(1 << 20), peer), "PeerFailed", *facts)


def test_host_that_vanishes_is_named() -> None:
    with Hosts((1, 1)) as hosts, hosts.start(wait_for_a_host_that_vanishes) as ranks:
        ranks.hear_all()
        hosts.drop_traffic(1)
        ranks.tell_all()
        ranks.results()


def wait_for_nothing(rank: Rank) -> tuple[str, str] | None:
    rank.init()
    window = rota.Window(1, timeout=timedelta(seconds=20))
    if rank.rank == 0:
        rank.tell()
        return error_of(window.wait_signal, 1)
    rank.hear()
    return None


@of_layouts(PAIR, ONE_BY_ONE)
def test_ctrl_c_ends_a_wait(layout: Layout) -> None:
    with layout.start(wait_for_nothing) as ranks:
        ranks.hear(0)
        ranks.wait_for_stderr(0, "a signal on channel 0; still waiting")
        ranks.kill(0, signal.SIGINT)
        assert ranks.hear_result(0)[0] == "KeyboardInterrupt"
        ranks.tell(1)
        ranks.results()


@on_layout(ONE_BY_ONE)
def test_ctrl_c_ends_a_put_to_another_host_and_the_window_goes_on(rank: Rank) -> None:
    rank.init("gloo")
    window = rota.Window(8 << 20)
    if rank.rank == 1:
        return rank.await_word()
    values = torch.ones(8 << 20)
    # It puts by then; if not yet, the interrupt comes a little earlier.
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    error = error_of(lambda: [window.put(values, 1) for _ in range(10_000)])
    check_error(error, "KeyboardInterrupt")
    small, got = torch.full((3,), 5.0), torch.empty(3)
    window.put(small, 1)
    window.get(got, 1)
    assert torch.equal(got, small)
    rank.say()


def time_out(rank: Rank) -> None:
    """Rank 0 meets rank 1 in a barrier that rank 1 leaves out."""
    rank.init()
    window = rota.Window(1)
    dist.barrier()
    if rank.rank == 0:
        error_of(window.wait_signal, 1, timeout=SHORT)
        dist.barrier()
    error = error_of(rota.Window, 1, timeout=SHORT)
    check_error(error, "Timeout", "rank 1/2 waited 0.2 s for rank 0")


def test_timeouts_name_who_did_not_come() -> None:
    with Ranks(2, time_out) as ranks:
        ranks.hear_result(1)


@on_layout(ONE_BY_ONE)  # test_interrupts.py has one host
def test_forked_child_may_not_use_its_parents_window(rank: Rank) -> None:
    rank.init()
    window = rota.Window(1)
    error = run_in_child(lambda: window.signal(1))
    check_error(error, "RotaError", "belongs to the parent process")
    dist.barrier()
    window.signal(1 - rank.rank)
    window.wait_signal(1 - rank.rank)
