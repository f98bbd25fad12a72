"""CUDA tensors of ranks on several hosts: the bits of the CPU, through GPUs and a device engine.

The hosts are simulated by ROTA_HOST_ID, and the engine is a stand-in for NCCL (device_engines.py).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import FORMATS, Format
from device_engines import num_exchanges, stand_in, that_moves_nothing, that_raises
from on_gpu import DEVICE, LIMIT_S, WAIT_S, Guarded, capture
from oracle import (
    DTYPES,
    FLOAT8_DTYPES,
    assert_same,
    name_of,
    ops_of,
    random_inputs,
    random_patterns,
)
from ranks import Rank, error_of
from several_hosts import ONE_BY_ONE, THREE_UNEVEN, TWO_BY_TWO, UNEVEN, Layout, by_hosts
from test_cuda_communicator import reduce_bucket_on_both

# The ranks of the second rail are not in the order of their hosts.
CROSSED = Layout((0, 1, 2, 2, 1, 0))
of_every_layout = pytest.mark.parametrize(
    "layout", [ONE_BY_ONE, TWO_BY_TWO, UNEVEN, THREE_UNEVEN, CROSSED], ids=str
)
TIME_S = 3 * LIMIT_S

TILE = 512
# Around parts of one tile and of several: each rail and host has one. Of the last, all parts are
# whole tiles in every layout, so results arrive in the tensor.
SIZES = (0, 1, 513, 2049, 20_001, 12 * TILE)


def run(layout: Layout, function: Callable[..., Any], *args: object) -> list[Any]:
    return layout.run(function, *args, timeout_s=TIME_S)


class Connected:
    """A communicator with joined GPUs; says whether a call went through them."""

    def __init__(self, rank: Rank, *, for_cpu: bool = False, **options: Any) -> None:
        torch.cuda.set_device(DEVICE)
        if not dist.is_initialized():
            rank.init("gloo", timeout_s=WAIT_S)
        self.engine = stand_in(for_cpu=for_cpu)
        self.comm = rota.Communicator(
            engine=self.engine, timeout=timedelta(seconds=WAIT_S), **options
        )
        self.comm.connect_device(DEVICE)
        assert self.comm.peer_access is not None and "device engine" in self.comm.peer_access

    def goes_through_engine(self, call: Callable[[], object]) -> bool:
        before = num_exchanges(self.engine)
        call()
        return num_exchanges(self.engine) > before

    def same_on_both(
        self,
        source: torch.Tensor,
        case: str,
        *,
        offset: int = 0,
        is_staged: bool = False,
        **options: Any,
    ) -> None:
        """All-reduces `source` on the CPU and on the GPU, and compares the results."""
        on_cpu, on_gpu = source.clone(), Guarded(source, offset)
        self.comm.all_reduce(on_cpu, **options)
        through = self.goes_through_engine(lambda: self.comm.all_reduce(on_gpu.tensor, **options))
        assert through != (is_staged or source.numel() == 0), case
        assert_same(on_gpu.get(case), on_cpu, case)


# ---- sums


def reduce_every_dtype(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    # What differs between layouts does not depend on the dtype.
    for dtype in DTYPES if layout == TWO_BY_TWO else (torch.float32, torch.float16, torch.int8):
        for size in SIZES:
            source = random_inputs(rank.world_size, size, dtype)[rank.rank]
            connected.same_on_both(source, f"{name_of(dtype)} {size}", offset=size % 2)
        connected.same_on_both(source, f"{name_of(dtype)} misaligned", offset=1)
        for op in ops_of(dtype)[1:]:
            source = random_patterns(rank.world_size, 1025, dtype)[rank.rank]
            connected.same_on_both(source, f"{name_of(dtype)} {op}", op=op)


@of_every_layout
def test_all_reduce_gives_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_every_dtype)


def reduce_with_wires(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank, for_cpu=True)
    wires = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8_DTYPES)
    for dtype, wire, op in itertools.product(
        (torch.float64, torch.float32, torch.float16), wires, ("sum", "avg", "max")
    ):
        if wire.itemsize > dtype.itemsize:
            continue
        inputs = random_inputs(rank.world_size, 5001, dtype)
        # pack would round float64 twice.
        is_staged = dtype == torch.float64 and wire != torch.float32
        case = f"{name_of(dtype)} {name_of(wire)} {op}"
        connected.same_on_both(inputs[rank.rank], case, op=op, wire_dtype=wire, is_staged=is_staged)
        if dtype == torch.float32 and op == "avg":
            connected.comm.all_reduce(tensor := inputs[rank.rank].to(DEVICE), op, wire_dtype=wire)
            assert_same(tensor.cpu(), by_hosts(inputs, layout, op, Format(wire, False)), case)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_all_reduce_with_a_wire_dtype_gives_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_with_wires)


def reduce_in_scaled_blocks(rank: Rank, layout: Layout) -> None:
    for wire in (torch.float16, torch.float8_e4m3fn):
        connected = Connected(rank, inter_wire_dtype=wire, inter_block_scaling=True)
        for dtype, size in itertools.product((torch.float32, torch.float64), (1, 513, 9001)):
            for op in ("sum", "avg"):
                source = random_inputs(rank.world_size, size, dtype)[rank.rank]
                case = f"{name_of(dtype)} {name_of(wire)} {op} {size}"
                connected.same_on_both(source, case, op=op)
            part, whole = Guarded(torch.zeros(size).to(dtype)), torch.zeros(size).to(dtype)
            source = random_inputs(rank.world_size, size * rank.world_size, dtype)[rank.rank]
            connected.comm.reduce_scatter(whole, source)
            connected.comm.reduce_scatter(part.tensor, source.to(DEVICE))
            assert_same(part.get("reduce_scatter"), whole, f"reduce_scatter {size}")


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_sums_in_scaled_blocks_between_hosts_give_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_in_scaled_blocks)


def reduce_in_tree(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    for dtype in (torch.float16, torch.float32, torch.int32):
        source = random_inputs(rank.world_size, 3001, dtype)[rank.rank]
        connected.same_on_both(source, name_of(dtype), order="tree")


def test_sums_in_a_tree_give_the_bits_of_the_cpu() -> None:
    run(TWO_BY_TWO, reduce_in_tree)


def reduce_many_chunks(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    # Three chunks of 32 MiB (kDeviceChunkBytes), the last of which is odd.
    numbers = torch.arange((16 << 20) + 1001).remainder(999_983).to(torch.float32)
    connected.comm.all_reduce(tensor := (numbers - rank.rank).to(DEVICE))
    assert_same(tensor.cpu(), 2 * numbers - 1, "three chunks")


def test_all_reduce_of_several_chunks_is_exact() -> None:
    run(ONE_BY_ONE, reduce_many_chunks)


def reduce_to_one(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    comm, own, n = connected.comm, rank.rank, rank.world_size
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), SIZES):
        case = f"{name_of(dtype)} {size}"
        inputs = random_inputs(n, size, dtype)
        on_cpu, on_gpu = inputs[own].clone(), Guarded(inputs[own])
        comm.reduce(on_cpu, n - 1)
        comm.reduce(on_gpu.tensor, n - 1)
        assert_same(on_gpu.get(case), on_cpu, f"reduce {case}")

        source = random_inputs(n, size * n, dtype)[own]
        part, guarded = torch.zeros(size).to(dtype), Guarded(torch.zeros(size).to(dtype))
        comm.reduce_scatter(part, source)
        through = connected.goes_through_engine(
            lambda guarded=guarded, source=source: comm.reduce_scatter(
                guarded.tensor, source.to(DEVICE)
            )
        )
        assert through == (size > 0), case
        assert_same(guarded.get(case), part, f"reduce_scatter {case}")
    comm = Connected(rank, inter_wire_dtype=torch.float16).comm
    source = random_inputs(n, 3000 * n, torch.float32)[own]
    part, guarded = torch.zeros(3000), Guarded(torch.zeros(3000))
    comm.reduce_scatter(part, source, "avg")
    comm.reduce_scatter(guarded.tensor, source.to(DEVICE), "avg")
    assert_same(guarded.get("float16"), part, "reduce_scatter in float16")


@of_every_layout
def test_reduce_and_reduce_scatter_give_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_to_one)


# ---- gradient buckets


def reduce_buckets(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    for wire, size in itertools.product(FORMATS, (0, 1, 513, 9001)):
        through = connected.goes_through_engine(
            lambda wire=wire, size=size: reduce_bucket_on_both(
                rank, connected.comm, wire, torch.float32, size, result_factor=1 / 1024
            )
        )
        assert through == (size > 0), (wire, size)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for wire in (Format(torch.float16, True), Format(torch.float32, False)):
            reduce_bucket_on_both(rank, connected.comm, wire, dtype, 5001, contribution_factor=0.5)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN, CROSSED], ids=str)
def test_reduce_bucket_gives_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_buckets)


def reduce_with_memory(rank: Rank, layout: Layout) -> None:
    """Which rank of a host keeps what is lost of an element differs; their sum does not."""
    connected = Connected(rank)
    n, size = rank.world_size, 5001
    for wire in (Format(torch.float16, False), Format(torch.float8_e4m3fn, True)):
        source = random_inputs(n, size, torch.float32)[rank.rank]
        buckets, residuals = [], []
        for device in ("cpu", DEVICE):
            residual = torch.zeros(size).to(device)
            guard = Guarded(torch.zeros(size)) if device == DEVICE else None
            if guard is not None:
                residual = guard.tensor
            stats = torch.zeros(2, dtype=torch.float64).to(device)
            for _ in range(3):
                bucket = source.clone().to(device)
                connected.comm.reduce_bucket(
                    bucket,
                    stats,
                    wire_dtype=wire.dtype,
                    block_scaling=wire.block_scaling,
                    residual=residual,
                    divisor=float(n),
                )
            buckets.append(bucket.cpu())
            residuals.append(guard.get("residual") if guard is not None else residual)
        assert_same(buckets[1], buckets[0], f"{wire}")
        for residual in residuals:
            dist.all_reduce(residual)
        assert_same(residuals[1], residuals[0], f"residuals of {wire}")
        assert residuals[0].count_nonzero() > 0


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_error_feedback_gives_the_bits_of_the_cpu(layout: Layout) -> None:
    run(layout, reduce_with_memory)


def reduce_with_state(rank: Rank, layout: Layout) -> None:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    engine = stand_in()
    inputs = random_inputs(rank.world_size, 5001, torch.float32)
    expected = by_hosts(inputs, layout, "avg", Format(torch.float8_e4m3fn, True))
    for device in ("cpu", DEVICE):
        state = rota.HookState(engine=engine, inter_wire_dtype=torch.float8_e4m3fn)
        parameter = torch.nn.Parameter(torch.zeros(5001).to(device))
        parameter.grad = inputs[rank.rank].clone().to(device)
        rota.reduce_gradients(parameter, state)
        assert_same(parameter.grad.cpu(), expected, str(device))
        assert (num_exchanges(engine) > 0) == (device == DEVICE)
    error, text = error_of(
        lambda: rota.reduce_gradients(parameter, rota.HookState(engine=stand_in()))
    )
    assert error == "ValueError" and "already has another engine" in text, text


@pytest.mark.torch_kernels
def test_gradients_of_a_state_with_an_engine_go_from_gpu_to_gpu() -> None:
    run(TWO_BY_TWO, reduce_with_state)


# ---- copies


def move(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    comm, own, n = connected.comm, rank.rank, rank.world_size
    for dtype, size in itertools.product((torch.bool, torch.complex64), SIZES):
        case = f"{name_of(dtype)} {size}"
        inputs = [
            t.to(torch.complex64) if dtype == torch.complex64 else t
            for t in random_patterns(n, size, torch.int16 if dtype == torch.complex64 else dtype)
        ]
        for root in (0, n - 1):
            sent = Guarded(inputs[own], offset=root)
            through = connected.goes_through_engine(
                lambda sent=sent, root=root: comm.broadcast(sent.tensor, root)
            )
            assert through == (size > 0), case
            assert_same(sent.get(case), inputs[root], f"broadcast {case}")
        gathered = Guarded(torch.zeros(size * n).to(dtype), offset=1)
        through = connected.goes_through_engine(
            lambda gathered=gathered, inputs=inputs: comm.all_gather(
                gathered.tensor, inputs[own].to(DEVICE)
            )
        )
        assert through == (size > 0), case
        assert_same(gathered.get(case), torch.cat(inputs), f"all_gather {case}")


@of_every_layout
def test_broadcast_and_all_gather_move_every_bit(layout: Layout) -> None:
    run(layout, move)


def move_many_chunks(rank: Rank, layout: Layout) -> None:
    comm = Connected(rank).comm
    size = (33 << 20) + 5
    inputs = random_patterns(rank.world_size, size, torch.uint8)
    comm.broadcast(tensor := inputs[rank.rank].to(DEVICE), 1)
    assert_same(tensor.cpu(), inputs[1], "broadcast")
    gathered = torch.zeros(size * rank.world_size, dtype=torch.uint8).to(DEVICE)
    comm.all_gather(gathered, inputs[rank.rank].to(DEVICE))
    assert_same(gathered.cpu(), torch.cat(inputs), "all_gather")


def test_copies_of_several_chunks_move_every_bit() -> None:
    run(ONE_BY_ONE, move_many_chunks)


# ---- streams, layouts of tensors, the backend


def use_streams(rank: Rank, layout: Layout) -> None:
    """Results are ordered with the caller's streams, whatever the streams take their time for."""
    comm = Connected(rank).comm
    inputs = random_inputs(rank.world_size, 30_001, torch.float32)
    expected = by_hosts(inputs, layout)
    side = torch.cuda.Stream(DEVICE)
    ballast = torch.zeros(2, 8 << 20).to(DEVICE)
    for _ in range(4):
        source = inputs[rank.rank].to(DEVICE)
        tensor = torch.empty_like(source)
        ballast[0].copy_(ballast[1])  # takes longer than ranks take to compare their calls
        tensor.copy_(source)
        work = comm.all_reduce(tensor, async_op=True)
        other = source.clone()
        comm.all_reduce(other)
        with torch.cuda.stream(side):
            third = inputs[rank.rank].to(DEVICE)
            comm.all_reduce(third)
            results = [third.clone()]
        assert work is not None
        work.wait()
        results += [tensor.clone(), other.clone()]
        side.synchronize()
        for result in results:
            assert_same(result.cpu(), expected, "all_reduce")
    wide = torch.zeros(2 * 30_001).to(DEVICE)
    view = wide[::2]
    view.copy_(inputs[rank.rank])
    comm.all_reduce(view)
    assert_same(wide.cpu()[::2], expected, "strided")
    assert wide.cpu()[1::2].count_nonzero() == 0


def test_calls_are_ordered_with_the_callers_streams() -> None:
    run(TWO_BY_TWO, use_streams)


def drop_tensors(rank: Rank, layout: Layout) -> None:
    comm, sevens = Connected(rank).comm, torch.full((30_001,), 7.0)
    for _ in range(10):
        comm.all_reduce(torch.ones(30_001).to(DEVICE), async_op=True)
        other = sevens.to(DEVICE)
        torch.cuda.synchronize()
        assert_same(other.cpu(), sevens, "a tensor that was made after the call")


def test_memory_of_a_dropped_tensor_is_not_reused_too_early() -> None:
    run(TWO_BY_TWO, drop_tensors)


def use_backend(rank: Rank, layout: Layout) -> None:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    engine = stand_in()
    options = rota.BackendOptions(engine=engine, inter_wire_dtype=torch.float16)
    group = dist.new_group(backend="rota", pg_options=options, timeout=timedelta(seconds=WAIT_S))
    inputs = random_inputs(rank.world_size, 5000, torch.float32)
    expected = by_hosts(inputs, layout, "avg", Format(torch.float16, False))
    before = num_exchanges(engine)
    tensor = inputs[rank.rank].to(DEVICE)
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    work.get_future().wait()
    assert_same(tensor.cpu(), expected, "all_reduce")
    part = torch.zeros(1250).to(DEVICE)
    dist.reduce_scatter_tensor(part, inputs[rank.rank].to(DEVICE), group=group)
    summed = by_hosts(inputs, layout, "sum", Format(torch.float16, False))
    assert_same(part.cpu(), summed[1250 * rank.rank : 1250 * (rank.rank + 1)], "reduce_scatter")
    assert num_exchanges(engine) > before
    dist.all_reduce(on_cpu := inputs[rank.rank].clone(), dist.ReduceOp.AVG, group=group)
    assert_same(on_cpu, expected, "CPU tensors")


def test_backend_rota_takes_a_device_engine() -> None:
    run(TWO_BY_TWO, use_backend)


# ---- what goes through the host's memory


def stage(rank: Rank, layout: Layout) -> None:
    connected = Connected(rank)
    comm, n = connected.comm, rank.world_size
    for dtype in FLOAT8_DTYPES:
        source = random_inputs(n, 1000, dtype)[rank.rank]
        connected.same_on_both(source, name_of(dtype), is_staged=True)

    def round_at_random() -> None:
        bucket, stats = torch.ones(1000).to(DEVICE), torch.zeros(2, dtype=torch.float64).to(DEVICE)
        comm.reduce_bucket(
            bucket, stats, wire_dtype=torch.float16, block_scaling=True, stochastic_seed=3
        )
        assert_same(bucket.cpu(), torch.full((1000,), float(n)), "stochastic rounding")

    assert not connected.goes_through_engine(round_at_random)
    error, text = error_of(lambda: comm.send(torch.ones(4).to(DEVICE), (rank.rank + 1) % n))
    assert error == "TransportError", text


def test_what_has_no_kernel_is_staged() -> None:
    run(TWO_BY_TWO, stage)


def stage_with_gloo(rank: Rank, layout: Layout) -> str | None:
    """As without an engine: Gloo's one backend for all devices would stage, too."""
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    inputs = random_inputs(rank.world_size, 1000, torch.float32)
    for engine in (None, dist.new_group(backend="gloo")):
        comm = rota.Communicator(engine=engine, timeout=timedelta(seconds=WAIT_S))
        comm.all_reduce(tensor := inputs[rank.rank].to(DEVICE))
        assert_same(tensor.cpu(), by_hosts(inputs, layout), "all_reduce")
        assert comm.peer_access is not None and "the network" in comm.peer_access
    return comm.peer_access


def test_an_engine_for_the_cpu_alone_stages() -> None:
    run(TWO_BY_TWO, stage_with_gloo)


def join_on_one_host(rank: Rank, layout: Layout) -> str | None:
    if layout.host_of[rank.rank] == 1:
        os.environ["ROTA_PEER_MEMORY"] = "symmetric"
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    engine = stand_in()
    comm = rota.Communicator(engine=engine, timeout=timedelta(seconds=WAIT_S))
    inputs = random_inputs(rank.world_size, 1000, torch.float32)
    comm.all_reduce(tensor := inputs[rank.rank].to(DEVICE))
    assert_same(tensor.cpu(), by_hosts(inputs, layout), "all_reduce")
    assert num_exchanges(engine) == 0
    return comm.peer_access


@pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs GPUs that have no symmetric memory"
)
def test_where_one_hosts_gpus_cannot_be_joined_all_ranks_stage() -> None:
    with TWO_BY_TWO.start(join_on_one_host, timeout_s=TIME_S) as ranks:
        assert set(ranks.results()) == {"the memory of 2 hosts and the network"}
        for rank in range(4):
            assert "go through the host's memory, which is slow" in ranks.stderr(rank)
        assert "the GPUs of another host cannot be joined" in ranks.stderr(0)
        assert "libnvidia-ml" in ranks.stderr(3)


# ---- disagreements and failures


def disagree(rank: Rank, layout: Layout) -> list[str]:
    connected = Connected(rank)
    comm, is_odd = connected.comm, rank.rank == 3
    ones = torch.ones(9)

    def on_own(device: Any) -> torch.Tensor:
        return ones.clone().to(device)

    texts = []
    for call in (
        lambda: comm.all_reduce(on_own(DEVICE)[: 9 if is_odd else 8]),
        lambda: comm.all_reduce(on_own(DEVICE), "max" if is_odd else "sum"),
        lambda: comm.all_reduce(on_own("cpu" if is_odd else DEVICE)),
        lambda: comm.broadcast(on_own(DEVICE), 1 if is_odd else 0),
    ):
        error, text = error_of(call)
        assert error == "Mismatch", text
        texts.append(text)
    comm.all_reduce(tensor := on_own(DEVICE))
    assert_same(tensor.cpu(), ones * 4, "the group goes on")
    return texts


def test_calls_that_differ_are_a_mismatch_on_every_rank() -> None:
    for texts in run(TWO_BY_TWO, disagree):
        for text, facts in zip(
            texts,
            (
                ("float32[8]", "float32[9]"),
                ("all_reduce(sum", "all_reduce(max"),
                ("two_shot, between GPUs)", "two_shot)"),
                ("root 0", "root 1"),
            ),
            strict=True,
        ):
            assert all(fact in text for fact in facts), text


def connect_before_others(rank: Rank, layout: Layout) -> tuple[str, str]:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    comm = rota.Communicator(engine=stand_in(), timeout=timedelta(seconds=WAIT_S))
    ones = torch.ones(8)
    call = comm.barrier if rank.rank == 3 else lambda: comm.all_reduce(ones.to(DEVICE))
    result = error_of(call)
    comm.all_reduce(tensor := ones.to(DEVICE))
    assert_same(tensor.cpu(), ones * 4, "the group goes on")
    return result


def test_joining_gpus_is_compared_with_other_calls() -> None:
    for error, text in run(TWO_BY_TWO, connect_before_others):
        assert error == "Mismatch", text
        assert "rank 2 called connect_device(); rank 3 called barrier()" in text, text


def use_engine_of_wrong_size(rank: Rank, layout: Layout) -> tuple[str, str]:
    rank.init("gloo", timeout_s=WAIT_S)
    stand_in()  # registers it
    groups = [dist.new_group(ranks, backend="cuda:device_gloo") for ranks in ([0, 1], [2, 3])]
    return error_of(lambda: rota.Communicator(engine=groups[rank.rank // 2]))


def test_engine_of_the_wrong_size_is_an_error_on_every_rank() -> None:
    for error, text in run(TWO_BY_TWO, use_engine_of_wrong_size):
        assert error == "ValueError", text
        assert "a group of 2 ranks" in text and "expected 4 ranks" in text


def use_engine_that_moves_nothing(rank: Rank, layout: Layout) -> tuple[str, str]:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    engine = that_moves_nothing(rank.rank, rank.world_size)
    comm = rota.Communicator(engine=engine, timeout=timedelta(seconds=WAIT_S))
    result = error_of(lambda: comm.connect_device(DEVICE))
    assert error_of(lambda: comm.all_reduce(torch.ones(4)))[0] == "TransportError"
    return result


def test_engine_that_does_not_deliver_is_an_error_on_every_rank() -> None:
    for error, text in run(ONE_BY_ONE, use_engine_that_moves_nothing):
        assert error == "TransportError", text
        assert "did not deliver" in text and "pass another engine" in text


def use_engine_that_fails_on_one_rank(rank: Rank, layout: Layout) -> tuple[str, str]:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo", timeout_s=WAIT_S)
    engine = stand_in()
    # Ends the waits of the others for rank 1, because Gloo cannot be aborted.
    engine._get_backend(DEVICE)._set_default_timeout(timedelta(seconds=1))
    if rank.rank == 1:
        engine = that_raises(rank.rank, rank.world_size)
    comm = rota.Communicator(engine=engine, timeout=timedelta(seconds=WAIT_S))
    result = error_of(lambda: comm.all_reduce(torch.ones(4).to(DEVICE)))
    assert error_of(lambda: comm.all_reduce(torch.ones(4)))[0] == result[0]
    return result


def test_engine_that_fails_on_one_rank_is_an_error_on_every_rank() -> None:
    for error, text in run(TWO_BY_TWO, use_engine_that_fails_on_one_rank):
        assert error == "TransportError", text
        # Rank 1's, unless it is so slow that another's wait has ended before.
        assert re.search("the engine of rank . failed to exchange CUDA tensors", text), text


def lose_last(rank: Rank, layout: Layout) -> tuple[str, str]:
    """The test kills the last rank while all go on."""
    del os.environ["ROTA_HOST_SILENCE_MS"]
    comm = Connected(rank).comm
    tensor = torch.zeros(4 << 20).to(DEVICE)  # most of the time the ranks are in the engine
    comm.all_reduce(tensor)
    tensor.cpu()
    rank.tell()

    def reduce() -> None:
        while True:
            comm.all_reduce(tensor)

    result = error_of(reduce)
    assert error_of(reduce)[0] == result[0]
    rank.tell()
    rank.hear()  # a rank that ends takes its connections with it
    return result


@pytest.mark.parametrize("layout", [ONE_BY_ONE, TWO_BY_TWO], ids=str)
def test_all_survivors_hear_of_a_killed_rank(layout: Layout) -> None:
    last = layout.world_size - 1
    with layout.start(lose_last, timeout_s=TIME_S) as ranks:
        for rank in range(last + 1):
            ranks.hear(rank)
        ranks.kill(last)
        killed_at = time.monotonic()
        for rank in range(last):
            ranks.hear(rank)
        assert time.monotonic() - killed_at < 5
        for rank in range(last):
            ranks.tell(rank)
        results = ranks.results(killed={last})
    for error, text in results[:last]:
        assert error == "PeerFailed", text
        assert f"rank {last}" in text, text


def interrupt_one(rank: Rank, layout: Layout) -> tuple[str, str]:
    comm = Connected(rank).comm
    rank.tell()
    if rank.rank == 1:
        rank.hear()
    return error_of(lambda: comm.all_reduce(torch.ones(8).to(DEVICE)))


def test_interrupted_call_is_an_error_on_every_rank() -> None:
    with ONE_BY_ONE.start(interrupt_one, timeout_s=TIME_S) as ranks:
        for rank in (0, 1):
            ranks.hear(rank)
        time.sleep(0.2)  # rank 0 waits now; if not yet, the interrupt comes a little earlier
        ranks.kill(0, signal.SIGINT)
        interrupted_at = time.monotonic()
        assert ranks.hear_result(0)[0] == "KeyboardInterrupt"
        assert time.monotonic() - interrupted_at < 2
        ranks.tell(1)
        error, text = ranks.results()[1]
    assert error == "PeerFailed" and "rank 0 was interrupted" in text, text


def capture_call(rank: Rank, layout: Layout) -> tuple[str, str]:
    comm = Connected(rank).comm
    tensor = torch.ones(8).to(DEVICE)
    comm.all_reduce(tensor)
    return error_of(lambda: capture(lambda: comm.all_reduce(tensor)))


def test_a_graph_cannot_capture_a_call() -> None:
    for error, text in run(ONE_BY_ONE, capture_call):
        assert error == "ValueError", text
        assert "which a CUDA graph cannot capture" in text
