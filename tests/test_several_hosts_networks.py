"""Hosts that are slow, and ranks that stand still: who is lost, and who is only late."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import torch

from hosts import Hosts
from oracle import assert_same, exact, exact_inputs
from ranks import Rank, Ranks, check_error, error_of
from several_hosts import TWO_BY_TWO
from test_several_hosts_failures import connect

NUM_ELEMS = 1 << 18


# ---- slow hosts


def reduce_on_slow_link(rank: Rank) -> float:
    communicator = connect(rank)
    rank.tell()
    rank.hear()
    inputs = exact_inputs(rank.world_size, 1 << 21, torch.float32)
    start = time.monotonic()
    communicator.all_reduce(tensor := inputs[rank.rank].clone())
    assert_same(tensor, exact(inputs, "sum"), "over a slow link")
    return time.monotonic() - start


def test_host_behind_a_slow_link_is_not_lost() -> None:
    """Signs of life do not wait behind data for as long as a host may be silent."""
    silence_ms = 3000  # before a rank of another host counts as lost; the tests share cores
    silence = {"ROTA_HOST_SILENCE_MS": str(silence_ms)}
    with Hosts((2, 1)) as hosts, hosts.start(reduce_on_slow_link, env=silence) as ranks:
        ranks.hear_all()
        hosts.set_rate("10mbit", host=1)
        ranks.tell_all()
        assert min(ranks.results()) > 2 * silence_ms / 1000, "so slow that silence would show"


# ---- ranks that stand still


def reduce_when_told(rank: Rank) -> tuple[str, str]:
    communicator = connect(rank)
    rank.tell()
    rank.hear()
    inputs = exact_inputs(rank.world_size, NUM_ELEMS, torch.float32)
    tensor = inputs[rank.rank].clone()
    error = error_of(lambda: communicator.all_reduce(tensor))
    if error[0] == "nothing":
        assert_same(tensor, exact(inputs, "sum"), "beside a pause")
    return error


STOPPED = 3
OTHERS = [0, 1, 2]


@contextlib.contextmanager
def with_one_stopped(silence_ms: int) -> Iterator[Ranks]:
    """The others are in a call that waits for it."""
    silence = {"ROTA_HOST_SILENCE_MS": str(silence_ms)}
    with TWO_BY_TWO.start(reduce_when_told, env=silence, timeout_s=40) as ranks:
        ranks.hear_all()
        ranks.kill(STOPPED, signal.SIGSTOP)
        for rank in OTHERS:
            ranks.tell(rank)
        yield ranks


def test_rank_that_stands_still_for_a_while_is_waited_for() -> None:
    with with_one_stopped(silence_ms=20_000) as ranks:
        time.sleep(2)
        ranks.kill(STOPPED, signal.SIGCONT)
        ranks.tell(STOPPED)
        assert ranks.results() == [("nothing", "no exception was raised")] * 4


def test_rank_that_stands_still_for_too_long_is_named_on_all_hosts() -> None:
    with with_one_stopped(silence_ms=700) as ranks:
        errors = [ranks.hear_result(rank) for rank in OTHERS]
        ranks.kill(STOPPED, signal.SIGCONT)
        ranks.tell(STOPPED)
        errors.append(ranks.hear_result(STOPPED))
        ranks.results()
    for error in errors:
        check_error(error, "PeerFailed", "rank 3 on host 1 has given no sign of life")
        assert error[1].count("rota") == 1, "the cause is stated once"
