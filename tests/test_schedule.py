"""The schedules, exhaustively for world sizes 1 to 16, without processes.

They are integer functions shared by the CPU loops and the CUDA kernels. Here they are called
through the extension and simulated on lists of ranks instead of numbers. test_cpp.py tests the
executors that use them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

import rota._C

pytestmark = pytest.mark.same_in_every_build

schedule = rota._C.schedule
RingAction = schedule.RingAction

WORLD_SIZES = range(1, 17)
GRANULES = (1, 2, 64, 100)
LENGTHS = (*range(130), 255, 256, 257, 1025, 2**31 - 1, 2**31 + 7, 2**40 + 1)

each_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda p: f"ws{p}")


# ---- chunk.h -------------------------------------------------------------------------------------


def assert_covers_once(ranges: list[tuple[int, int]], num_elems: int) -> None:
    """The ranges (begin, num_elems) follow each other without a gap from 0 to num_elems."""
    end = 0
    for begin, length in ranges:
        assert begin == end and length >= 0
        end = begin + length
    assert end == num_elems


@pytest.mark.parametrize("granule", GRANULES, ids=lambda granule: f"granule{granule}")
@pytest.mark.parametrize("num_shards", WORLD_SIZES, ids=lambda shards: f"shards{shards}")
def test_shard_of_any_length_covers_each_element_once(num_shards: int, granule: int) -> None:
    for num_elems in LENGTHS:
        shards = [schedule.even_shard(num_elems, num_shards, i, granule) for i in range(num_shards)]
        assert_covers_once([(shard.begin, shard.num_elems) for shard in shards], num_elems)
        longest = shards[0].num_elems
        # Equal except for rounding to granules; only the last ones may be shorter.
        assert longest * num_shards < num_elems + granule * num_shards + num_shards
        for shard, following in itertools.pairwise(shards):
            assert shard.num_elems in (longest, num_elems - shard.begin)
            assert following.num_elems == 0 or following.begin % granule == 0


@pytest.mark.parametrize("chunk_elems", (1, 2, 3, 64, 100, 1024))
def test_chunk_of_any_length_covers_each_element_once(chunk_elems: int) -> None:
    for num_elems in range(1100):
        num_chunks = -(-num_elems // chunk_elems)
        chunks = [schedule.chunk_of(num_elems, chunk_elems, i) for i in range(num_chunks)]
        assert_covers_once([(chunk.begin, chunk.num_elems) for chunk in chunks], num_elems)
        assert all(chunk.num_elems == chunk_elems for chunk in chunks[:-1])
        assert schedule.chunk_of(num_elems, chunk_elems, num_chunks).num_elems == 0


# ---- ring.h --------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A shard or chunk in transit, and the ranks whose contributions it contains, in order."""

    shard: int
    ranks: tuple[int, ...]

    def plus(self, rank: int) -> Message:
        return Message(self.shard, (*self.ranks, rank))


@each_world_size
def test_ring_all_steps_sum_every_shard_once_in_ring_order(world_size: int) -> None:
    num_steps = schedule.ring_num_steps(world_size)
    assert num_steps == 2 * (world_size - 1)  # also the number of shards that each rank sends
    kept: list[dict[int, Message]] = [{} for _ in range(world_size)]

    def sends(rank: int, step: int) -> int:
        return schedule.ring_step(rank, world_size, step).send_shard

    messages = [Message(sends(rank, 0), (rank,)) for rank in range(world_size)]
    for step in range(num_steps):
        received = [
            messages[schedule.previous_rank(rank, world_size)] for rank in range(world_size)
        ]
        for rank, message in enumerate(received):
            own = schedule.ring_step(rank, world_size, step)
            action = own.action
            assert own.recv_shard == message.shard
            if action != RingAction.COPY:
                message = message.plus(rank)
            is_complete = len(message.ranks) == world_size
            assert is_complete == (action != RingAction.REDUCE)
            if is_complete:
                assert message.shard not in kept[rank]
                kept[rank][message.shard] = message
            if step + 1 < num_steps:
                assert message.shard == sends(rank, step + 1)
            messages[rank] = message

    for shards in kept if world_size > 1 else []:
        assert sorted(shards) == list(range(world_size))
        for shard, message in shards.items():
            # Every rank once, in ring order, starting at the rank with the shard's number.
            order = tuple((shard + i) % world_size for i in range(world_size))
            assert message.ranks == order


@pytest.mark.parametrize("granule", GRANULES, ids=lambda granule: f"granule{granule}")
@each_world_size
def test_chunk_of_even_shard_all_rounds_cover_the_same_shards_whatever_the_chunk(
    world_size: int, granule: int
) -> None:
    for num_elems in LENGTHS:
        shards = [schedule.even_shard(num_elems, world_size, i, granule) for i in range(world_size)]
        longest = max(shard.num_elems for shard in shards)
        # From one granule to the whole shard; bounded below so that long tensors need few rounds.
        at_least = -(-longest // (50 * granule))
        for chunk_granules in sorted({max(at_least, k) for k in (1, 2, 3, 7)} | {2**34}):
            chunk_elems = chunk_granules * granule
            num_rounds = schedule.num_chunks_of_shards(num_elems, world_size, chunk_elems, granule)
            assert num_rounds == -(-longest // chunk_elems)
            for number, shard in enumerate(shards):
                chunks = [
                    schedule.chunk_of_even_shard(
                        num_elems, world_size, number, chunk_elems, i, granule
                    )
                    for i in range(num_rounds + 1)
                ]
                assert_covers_once(
                    [(chunk.begin - shard.begin, chunk.num_elems) for chunk in chunks],
                    shard.num_elems,
                )
                assert chunks[-1].num_elems == 0
                assert all(
                    chunk.num_elems == chunk_elems or following.num_elems == 0
                    for chunk, following in itertools.pairwise(chunks)
                )


class Written(NamedTuple):
    """What a rank writes for the next rank in a step of the ordered ring."""

    partial: Message | None = None
    result: Message | None = None


@each_world_size
def test_ordered_ring_any_chunks_sums_in_ascending_rank_everywhere(world_size: int) -> None:
    last = world_size - 1
    for num_chunks in range(2 * world_size + 4):
        num_steps = schedule.ordered_ring_num_steps(world_size, num_chunks)
        results: list[dict[int, Message]] = [{} for _ in range(world_size)]
        written = [Written() for _ in range(world_size)]  # in the step before
        for step in range(num_steps):
            writes = []
            for rank in range(world_size):
                chunks = schedule.ordered_ring_step(rank, world_size, num_chunks, step)
                from_previous = written[schedule.previous_rank(rank, world_size)]
                partial: Message | None = None
                result: Message | None = None
                if chunks.partial_chunk >= 0:
                    before = (
                        Message(chunks.partial_chunk, ()) if rank == 0 else from_previous.partial
                    )
                    assert before is not None and before.shard == chunks.partial_chunk
                    partial = before.plus(rank)
                    if rank == last:
                        partial, result = None, partial
                if chunks.result_chunk >= 0:
                    assert rank != last
                    result = from_previous.result
                    assert result is not None and result.shard == chunks.result_chunk
                if result is not None:
                    assert result.shard not in results[rank]
                    results[rank][result.shard] = result
                writes.append(Written(partial, result))
            written = writes
        expected = {chunk: Message(chunk, tuple(range(world_size))) for chunk in range(num_chunks)}
        assert all(result == expected for result in results)


@each_world_size
def test_ordered_ring_num_steps_is_minimal(world_size: int) -> None:
    # A link carries one chunk per step, so the last chunk enters in step num_chunks - 1. It takes
    # world_size - 1 hops from rank 0 to the last rank; the sum takes as many to reach every rank.
    for num_chunks in range(1, 2 * world_size + 4):
        num_steps = schedule.ordered_ring_num_steps(world_size, num_chunks)
        assert num_steps == (num_chunks - 1) + (world_size - 1) + (world_size - 1) + 1
        for step in (0, num_steps - 1):
            works = [
                schedule.ordered_ring_step(rank, world_size, num_chunks, step)
                for rank in range(world_size)
            ]
            assert any(work.partial_chunk >= 0 or work.result_chunk >= 0 for work in works)


# ---- rank_set.h ----------------------------------------------------------------------------------


def ranks_of(ranks: schedule.RankSet) -> list[int]:
    return [ranks.rank_at(place) for place in range(ranks.num_ranks)]


@each_world_size
def test_rank_sets_two_levels_meet_every_rank_once(world_size: int) -> None:
    everyone = list(range(world_size))
    assert ranks_of(schedule.everyone(world_size)) == everyone
    for group_size in (g for g in range(1, world_size + 1) if world_size % g == 0):
        for rank in everyone:
            group = schedule.group_of(rank, group_size)
            across = schedule.across_groups(rank, world_size, group_size)
            # Both are ascending and contain this rank.
            for ranks in (group, across):
                assert ranks_of(ranks) == sorted(ranks_of(ranks))
                assert ranks.rank_at(ranks.place_of(rank)) == rank
            # All ranks of a level agree on it.
            for other in ranks_of(group):
                assert ranks_of(schedule.group_of(other, group_size)) == ranks_of(group)
            for other in ranks_of(across):
                again = schedule.across_groups(other, world_size, group_size)
                assert ranks_of(again) == ranks_of(across)
            # The groups in ascending order, joined, are all ranks in ascending order.
            groups = [ranks_of(schedule.group_of(other, group_size)) for other in ranks_of(across)]
            assert [other for members in groups for other in members] == everyone


# ---- direct.h ------------------------------------------------------------------------------------


@each_world_size
def test_rotated_peer_any_index_reads_each_peer_once(world_size: int) -> None:
    ranks = range(world_size)
    for rank in ranks:
        peers = [schedule.rotated_peer(rank, world_size, i) for i in range(world_size - 1)]
        assert sorted(peers) == [peer for peer in ranks if peer != rank]
    for index in range(world_size - 1):  # at each index, no two ranks read the same peer
        assert len({schedule.rotated_peer(rank, world_size, index) for rank in ranks}) == world_size


def test_two_shot_step_each_round_is_contributed_one_step_before_it_is_reduced() -> None:
    for num_rounds in range(20):
        steps = [
            schedule.two_shot_step(num_rounds, step)
            for step in range(schedule.two_shot_num_steps(num_rounds))
        ]
        contributed = {step.contribute_round: i for i, step in enumerate(steps)}
        reduced = {step.reduce_round: i for i, step in enumerate(steps)}
        for rounds in (contributed, reduced):
            assert sorted(rounds) == list(range(-1, num_rounds))
        assert [step.contribute_round for step in steps] == [*range(num_rounds), -1]
        assert all(reduced[round_] == contributed[round_] + 1 for round_ in range(num_rounds))


# ---- select.h ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", (*WORLD_SIZES, 17, 32, 64), ids=lambda p: f"ws{p}")
def test_select_any_size_chooses_only_among_equal_bits(world_size: int) -> None:
    sizes = sorted({0, 1, *(2**k + d for k in range(48) for d in (-1, 0, 1))})
    chosen = [schedule.select(world_size, num_bytes) for num_bytes in sizes]
    # Never the classic ring: it sums in another order, so the choice would change results.
    assert set(chosen) <= {"one_shot", "two_shot", "ordered_ring"}
    # One threshold: once a message is too long for one_shot, all longer ones are.
    assert chosen == sorted(chosen, key=lambda name: name != "one_shot")
    assert chosen[sizes.index(4)] == "one_shot"
