"""What ranks on several hosts see when one of them fails: DESIGN.md's failure contract."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from hosts import Hosts
from ranks import Rank, check_error, error_of, kill_self
from several_hosts import TWO_BY_TWO, Layout, on_layout

NUM_ELEMS = 1 << 20


def connect(rank: Rank, timeout_s: float = 30.0) -> rota.Communicator:
    rank.init("gloo", timeout_s)
    communicator = rota.Communicator(timeout=timedelta(seconds=timeout_s))
    communicator.barrier()
    return communicator


def reduce_until_error(comm: rota.Communicator) -> tuple[str, str, float]:
    """The error's type and text, and the seconds until it came."""
    tensor = torch.ones(NUM_ELEMS)

    def reduce() -> None:
        while True:
            comm.all_reduce(tensor)

    start = time.monotonic()
    return *error_of(reduce), time.monotonic() - start


def lose_a_rank(rank: Rank, victim: int) -> tuple[str, str, float]:
    comm = connect(rank)
    rank.tell()
    if rank.rank == victim:
        rank.hear()  # all have left the barrier, which the failure of a later call would end, too
        kill_self()
    result = reduce_until_error(comm)
    time.sleep(1)  # a rank that ends takes its connections with it
    return result


@pytest.mark.parametrize("victim", [0, 3])
def test_all_hosts_hear_of_a_killed_rank(victim: int) -> None:
    with TWO_BY_TWO.start(lose_a_rank, victim, timeout_s=40) as ranks:
        ranks.hear_all()
        ranks.tell(victim)
        results = ranks.results(killed={victim})
    for rank in sorted({0, 1, 2, 3} - {victim}):
        *error, seconds = results[rank]
        check_error(error, "PeerFailed", f"rank {victim}")
        assert seconds < 5, (rank, seconds)


def end_before_the_others(rank: Rank, sender: int, receiver: int) -> tuple[str, str]:
    """Rank 2 ends while the data of its last call is still on its way from sender to receiver."""
    rank.init()
    num_elems = 1 << 27
    sent, expected = [0] * rank.world_size, [0] * rank.world_size
    if rank.rank == sender:
        sent[receiver] = num_elems
    if rank.rank == receiver:
        expected[sender] = num_elems
    output = torch.empty(sum(expected))
    dist.all_to_all_single(output, torch.ones(sum(sent)), expected, sent)
    if rank.rank == 2:
        kill_self()
    assert bool((output == 1).all())
    rank.tell()
    rank.hear()
    error = error_of(dist.barrier)
    time.sleep(1)  # a rank that ends takes its connections with it
    return error


@pytest.mark.parametrize(
    ("layout", "sender", "receiver"),
    [(TWO_BY_TWO, 0, 3), (Layout((0, 1, 2, 2)), 0, 1)],
    ids=["own_host_is_in_the_call", "own_host_has_told_the_others"],
)
def test_rank_that_has_done_its_part_may_end(layout: Layout, sender: int, receiver: int) -> None:
    with layout.start(end_before_the_others, sender, receiver, timeout_s=40) as ranks:
        for rank in (0, 1, 3):
            ranks.hear(rank)
        for rank in (0, 1, 3):
            ranks.tell(rank)
        results = ranks.results(killed=[2])
        pid = ranks.pid(2)
    for rank in (0, 1, 3):
        check_error(results[rank], "PeerFailed", f"rank 2 (pid {pid}) has died")


@on_layout(TWO_BY_TWO, timeout_s=40)
def test_rank_that_is_late_is_named_on_all_hosts(rank: Rank) -> None:
    comm = connect(rank, timeout_s=2)
    if rank.rank == 3:
        time.sleep(4)
    error = error_of(lambda: comm.all_reduce(torch.ones(4)))
    if rank.rank != 3:
        check_error(error, "Timeout", "is rank 3 alive?", f"rota.all_reduce: rank {rank.rank}/4")


def reduce_until_the_network_fails(rank: Rank) -> tuple[str, str, float]:
    del os.environ["ROTA_HOST_SILENCE_MS"]
    comm = connect(rank)
    rank.tell()
    return reduce_until_error(comm)


@pytest.mark.parametrize("how", ["drop_traffic", "take_link_down", "drop_sent", "drop_received"])
def test_host_whose_link_fails_is_named_on_the_others(how: str) -> None:
    """Both ways or one; rank 2 alone is on host 1."""
    is_half_open = how in ("drop_sent", "drop_received")
    with Hosts((2, 1)) as hosts, hosts.start(reduce_until_the_network_fails) as ranks:
        ranks.hear_all()
        getattr(hosts, how)(1)
        results = ranks.results()
    for error, text, seconds in results:
        assert error == "PeerFailed" and "on host" in text, (error, text)
        assert "no sign of life" in text or not is_half_open, text
        assert seconds < 20, "a hang; benchmarks/failures.py measures the 2 s"
    are_named = ["rank 2 on host 1" in text for _, text, _ in results[:2]]
    assert any(are_named) if is_half_open else all(are_named), results


def lose_what_is_on_the_way(rank: Rank) -> tuple[str, str]:
    """Rank 2 has done its part of the broadcast when its link fails, with the data still on it."""
    del os.environ["ROTA_HOST_SILENCE_MS"]
    comm = connect(rank)
    tensor = torch.ones(NUM_ELEMS // 4)
    error = error_of(comm.broadcast, tensor, 2)
    rank.tell()
    rank.hear()
    return error


def test_data_lost_on_the_way_is_noticed() -> None:
    with Hosts((2, 1), rate="1mbit") as hosts, hosts.start(lose_what_is_on_the_way) as ranks:
        ranks.hear(2)
        time.sleep(1)  # for a sign of life that says that rank 2 has completed the call
        hosts.drop_traffic(1)
        for rank in (0, 1):
            ranks.hear(rank)
        ranks.tell_all()
        results = ranks.results()
    assert results[2][0] == "nothing"
    for error in results[:2]:
        check_error(error, "PeerFailed", "rank 2 on host 1 has given no sign of life")


def interrupt_one(rank: Rank) -> tuple[str, str]:
    comm = connect(rank)
    if rank.rank == 3:
        return error_of(rank.hear)
    rank.tell()
    return error_of(lambda: comm.all_reduce(torch.ones(4)))


def test_interrupted_rank_tells_all_hosts() -> None:
    with TWO_BY_TWO.start(interrupt_one, timeout_s=40) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        time.sleep(0.2)  # they wait now; if not yet, the interrupt comes a little earlier
        ranks.kill(0, signal.SIGINT)
        first = ranks.hear_result(0)
        others = [ranks.hear_result(rank) for rank in (1, 2)]
        ranks.tell(3)
        ranks.results()
    assert first[0] == "KeyboardInterrupt", first
    for error in others:
        check_error(error, "PeerFailed", "rank 0 was interrupted")
