"""A rank's messages to itself, as pipelines of one stage and rings of one rank send them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ranks import Rank, check_error, error_of, on_ranks
from several_hosts import ONE_BY_ONE, PAIR, TWO_BY_TWO, of_layouts, on_layout

LONG = 1 << 20  # elements of float32: many times what a link holds


@of_layouts(PAIR, ONE_BY_ONE, TWO_BY_TWO)
@on_layout()
def test_message_to_the_own_rank_arrives(rank: Rank) -> None:
    comm = rank.communicator()
    own, peer = rank.rank, (rank.rank + 1) % rank.world_size
    alone = [dist.new_group([r]) for r in range(rank.world_size)][own]
    for group in (None, alone):
        for num_elems in (0, 1, LONG):
            sent, output = torch.arange(num_elems) + own, torch.zeros(num_elems, dtype=torch.int64)
            ops = [dist.P2POp(dist.isend, sent, own, group, tag=3)]
            ops.append(dist.P2POp(dist.irecv, output, own, group, tag=3))
            for batch in (ops, ops[::-1]):
                output.zero_()
                for work in dist.batch_isend_irecv(batch):
                    work.wait()
                assert torch.equal(output, sent)

    # Blocking: the message is kept until its recv; strided tensors; the order of one tag.
    matrix, received = torch.randn(5, 7), torch.zeros(7, 5)
    for factor in (1, 2):
        comm.send(factor * matrix, own)
    matrix *= 0  # has been copied
    other = torch.tensor([float(own)])
    comm.send(other, own, tag=1)
    assert comm.recv(other.neg_(), tag=1) == own and other == own
    first, second = torch.zeros(5, 7), received.t()
    assert comm.recv(first, own) == own and comm.recv(second, own) == own
    assert torch.equal(second, 2 * first) and first.any()

    # Beside a message of another rank.
    outputs = [torch.zeros(LONG) for _ in range(2)]
    works = [comm.irecv(outputs[0], own), comm.irecv(outputs[1], (own - 1) % rank.world_size)]
    works += [comm.isend(torch.full((LONG,), own + 1.0), to) for to in (own, peer)]
    for work in works:
        work.wait()
    assert outputs[0].eq(own + 1).all() and outputs[1].eq((own - 1) % rank.world_size + 1).all()


@on_ranks(1)
def test_message_to_the_own_rank_of_another_length_is_a_mismatch(rank: Rank) -> None:
    comm = rank.communicator()
    recv = comm.irecv(torch.zeros(3), 0)
    comm.send(torch.zeros(4), 0)
    error = error_of(recv.wait)
    comm.send(torch.ones(2), 0)
    comm.recv(output := torch.zeros(2), 0)
    assert output.eq(1).all()
    check_error(
        error,
        "Mismatch",
        "rank 0 called send(float32[4], tag 0)",
        "rank 0 called recv(float32[3], tag 0)",
    )
