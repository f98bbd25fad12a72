"""CUDA tensors of ranks on several hosts: the bits of the CPU, through GPUs and a device engine."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import FORMATS, Format
from connected_hosts import Connected, on_layout
from device_engines import make_engine, num_exchanges
from on_gpu import DEVICE, WAIT_S, Guarded, init
from oracle import (
    DTYPES,
    FLOAT8_DTYPES,
    assert_same,
    name_of,
    ops_of,
    random_inputs,
    random_patterns,
)
from ranks import Rank, check_error, error_of
from several_hosts import ONE_BY_ONE, THREE_UNEVEN, TWO_BY_TWO, UNEVEN, Layout, by_hosts, of_layouts
from test_cuda_communicator import reduce_bucket_on_both

# The ranks of the second rail are not in the order of their hosts.
CROSSED = Layout((0, 1, 2, 2, 1, 0))
of_every_layout = of_layouts(ONE_BY_ONE, TWO_BY_TWO, UNEVEN, THREE_UNEVEN, CROSSED)

TILE = 512
# Around parts of one tile and of several: each rail and host has one. All parts of the last are
# whole tiles in every layout, so results arrive in the tensor.
SIZES = (0, 1, 513, 2049, 20_001, 12 * TILE)


# ---- sums


@of_every_layout
@on_layout()
def test_all_reduce_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    connected = Connected(rank)
    # What differs between layouts does not depend on the dtype.
    few = (torch.float32, torch.float16, torch.int8)
    for dtype in DTYPES if rank.layout == TWO_BY_TWO else few:
        for size in SIZES:
            source = random_inputs(rank.world_size, size, dtype)[rank.rank]
            connected.same_on_both(source, f"{name_of(dtype)} {size}", offset=size % 2)
        connected.same_on_both(source, f"{name_of(dtype)} misaligned", offset=1)
        for op in ops_of(dtype)[1:]:
            source = random_patterns(rank.world_size, 1025, dtype)[rank.rank]
            connected.same_on_both(source, f"{name_of(dtype)} {op}", op=op)


@of_layouts(TWO_BY_TWO, UNEVEN)
@on_layout()
def test_all_reduce_with_a_wire_dtype_gives_the_bits_of_the_cpu(rank: Rank) -> None:
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
            assert_same(tensor.cpu(), by_hosts(inputs, rank.layout, op, Format(wire, False)), case)


@of_layouts(TWO_BY_TWO, UNEVEN)
@on_layout()
def test_sums_in_scaled_blocks_between_hosts_give_the_bits_of_the_cpu(rank: Rank) -> None:
    for wire in (torch.float16, torch.float8_e4m3fn):
        connected = Connected(rank, inter_wire_dtype=wire, inter_block_scaling=True)
        for dtype, size in itertools.product((torch.float32, torch.float64), (1, 513, 9001)):
            for op in ("sum", "avg"):
                source = random_inputs(rank.world_size, size, dtype)[rank.rank]
                case = f"{name_of(dtype)} {name_of(wire)} {op} {size}"
                connected.same_on_both(source, case, op=op)
            source = random_inputs(rank.world_size, size * rank.world_size, dtype)[rank.rank]
            connected.same_scattered(source, f"reduce_scatter {size}")


@on_layout(TWO_BY_TWO)
def test_sums_in_a_tree_give_the_bits_of_the_cpu(rank: Rank) -> None:
    connected = Connected(rank)
    for dtype in (torch.float16, torch.float32, torch.int32):
        source = random_inputs(rank.world_size, 3001, dtype)[rank.rank]
        connected.same_on_both(source, name_of(dtype), order="tree")


@on_layout(ONE_BY_ONE)
def test_all_reduce_of_several_chunks_is_exact(rank: Rank) -> None:
    connected = Connected(rank)
    # Three chunks of 32 MiB (kDeviceChunkBytes), the last of which is odd.
    numbers = torch.arange((16 << 20) + 1001).remainder(999_983).to(torch.float32)
    connected.comm.all_reduce(tensor := (numbers - rank.rank).to(DEVICE))
    assert_same(tensor.cpu(), 2 * numbers - 1, "three chunks")


@of_every_layout
@on_layout()
def test_reduce_and_reduce_scatter_give_the_bits_of_the_cpu(rank: Rank) -> None:
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
        connected.same_scattered(source, f"reduce_scatter {case}")
    source = random_inputs(n, 3000 * n, torch.float32)[own]
    narrow = Connected(rank, inter_wire_dtype=torch.float16, inter_block_scaling=False)
    narrow.same_scattered(source, "reduce_scatter in float16", "avg")


# ---- gradient buckets


@of_layouts(TWO_BY_TWO, UNEVEN, CROSSED)
@on_layout()
def test_reduce_bucket_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    connected = Connected(rank)
    for wire, size in itertools.product(FORMATS, (0, 1, 513, 9001)):
        args = (rank, connected.comm, wire, torch.float32, size)
        through = connected.goes_through_engine(
            reduce_bucket_on_both, *args, result_factor=1 / 1024
        )
        assert through == (size > 0), (wire, size)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        for wire in (Format(torch.float16, True), Format(torch.float32, False)):
            reduce_bucket_on_both(rank, connected.comm, wire, dtype, 5001, contribution_factor=0.5)


@of_layouts(TWO_BY_TWO, UNEVEN)
@on_layout()
def test_error_feedback_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    """Which rank of a host keeps what is lost of an element differs; their sum does not."""
    connected = Connected(rank)
    n, size = rank.world_size, 5001
    for wire in (Format(torch.float16, False), Format(torch.float8_e4m3fn, True)):
        source = random_inputs(n, size, torch.float32)[rank.rank]
        buckets, residuals = [], []
        for device in ("cpu", DEVICE):
            guard = Guarded(torch.zeros(size))
            residual = guard.tensor if device == DEVICE else torch.zeros(size)
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
            residuals.append(guard.get("residual") if device == DEVICE else residual)
        assert_same(buckets[1], buckets[0], f"{wire}")
        for residual in residuals:
            dist.all_reduce(residual)
        assert_same(residuals[1], residuals[0], f"residuals of {wire}")
        assert residuals[0].count_nonzero() > 0


@pytest.mark.torch_kernels
@on_layout(TWO_BY_TWO)
def test_gradients_of_a_state_with_an_engine_go_from_gpu_to_gpu(rank: Rank) -> None:
    init(rank, "gloo")
    engine = make_engine()
    inputs = random_inputs(rank.world_size, 5001, torch.float32)
    expected = by_hosts(inputs, rank.layout, "avg", Format(torch.float8_e4m3fn, True))
    for device in ("cpu", DEVICE):
        state = rota.HookState(engine=engine, inter_wire_dtype=torch.float8_e4m3fn)
        parameter = torch.nn.Parameter(torch.zeros(5001).to(device))
        parameter.grad = inputs[rank.rank].clone().to(device)
        rota.reduce_gradients(parameter, state)
        assert_same(parameter.grad.cpu(), expected, str(device))
        assert (num_exchanges(engine) > 0) == (device == DEVICE)
    error = error_of(lambda: rota.reduce_gradients(parameter, rota.HookState(engine=make_engine())))
    check_error(error, "ValueError", "already has another engine")


# ---- copies


@of_every_layout
@on_layout()
def test_broadcast_and_all_gather_move_every_bit(rank: Rank) -> None:
    connected = Connected(rank)
    comm, own, n = connected.comm, rank.rank, rank.world_size
    for dtype, size in itertools.product((torch.bool, torch.complex64), SIZES):
        case = f"{name_of(dtype)} {size}"
        inputs = random_patterns(n, size, dtype)
        for root in (0, n - 1):
            sent = Guarded(inputs[own], offset=root)
            through = connected.goes_through_engine(comm.broadcast, sent.tensor, root)
            assert through == (size > 0), case
            assert_same(sent.get(case), inputs[root], f"broadcast {case}")
        gathered = Guarded(torch.zeros(size * n).to(dtype), offset=1)
        through = connected.goes_through_engine(
            comm.all_gather, gathered.tensor, inputs[own].to(DEVICE)
        )
        assert through == (size > 0), case
        assert_same(gathered.get(case), torch.cat(inputs), f"all_gather {case}")


@on_layout(ONE_BY_ONE)
def test_copies_of_several_chunks_move_every_bit(rank: Rank) -> None:
    comm = Connected(rank).comm
    size = (33 << 20) + 5
    inputs = random_patterns(rank.world_size, size, torch.uint8)
    comm.broadcast(tensor := inputs[rank.rank].to(DEVICE), 1)
    assert_same(tensor.cpu(), inputs[1], "broadcast")
    gathered = torch.zeros(size * rank.world_size, dtype=torch.uint8).to(DEVICE)
    comm.all_gather(gathered, inputs[rank.rank].to(DEVICE))
    assert_same(gathered.cpu(), torch.cat(inputs), "all_gather")


# ---- streams, layouts of tensors, the backend


@on_layout(TWO_BY_TWO)
def test_calls_are_ordered_with_the_callers_streams(rank: Rank) -> None:
    """Results are ordered with the caller's streams, whatever the streams take their time for."""
    comm = Connected(rank).comm
    inputs = random_inputs(rank.world_size, 30_001, torch.float32)
    expected = by_hosts(inputs, rank.layout)
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


@on_layout(TWO_BY_TWO)
def test_memory_of_a_dropped_tensor_is_not_reused_too_early(rank: Rank) -> None:
    comm, sevens = Connected(rank).comm, torch.full((30_001,), 7.0)
    for _ in range(10):
        comm.all_reduce(torch.ones(30_001).to(DEVICE), async_op=True)
        other = sevens.to(DEVICE)
        torch.cuda.synchronize()
        assert_same(other.cpu(), sevens, "a tensor that was made after the call")


@on_layout(TWO_BY_TWO)
def test_backend_rota_takes_a_device_engine(rank: Rank) -> None:
    init(rank, "gloo")
    engine = make_engine()
    options = rota.BackendOptions(
        engine=engine, inter_wire_dtype=torch.float16, inter_block_scaling=False
    )
    group = dist.new_group(backend="rota", pg_options=options, timeout=timedelta(seconds=WAIT_S))
    inputs = random_inputs(rank.world_size, 5000, torch.float32)
    expected = by_hosts(inputs, rank.layout, "avg", Format(torch.float16, False))
    before = num_exchanges(engine)
    tensor = inputs[rank.rank].to(DEVICE)
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    work.get_future().wait()
    assert_same(tensor.cpu(), expected, "all_reduce")
    part = torch.zeros(1250).to(DEVICE)
    dist.reduce_scatter_tensor(part, inputs[rank.rank].to(DEVICE), group=group)
    summed = by_hosts(inputs, rank.layout, "sum", Format(torch.float16, False))
    assert_same(part.cpu(), summed[1250 * rank.rank : 1250 * (rank.rank + 1)], "reduce_scatter")
    assert num_exchanges(engine) > before
    dist.all_reduce(on_cpu := inputs[rank.rank].clone(), dist.ReduceOp.AVG, group=group)
    assert_same(on_cpu, expected, "CPU tensors")
