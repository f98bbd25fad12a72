"""rota.Communicator on CUDA tensors gives the same bits as on CPU tensors."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import BUCKET_DTYPES, FORMATS, Format
from on_gpu import DEVICE, MAX_LOW_LATENCY_BYTES, Guarded, connect, init, on_ranks, run_ranks
from oracle import (
    DTYPES,
    assert_same,
    exact_inputs,
    name_of,
    ops_of,
    random_inputs,
    random_patterns,
)
from ranks import Rank, error_of

# Few sizes: processes on one GPU run in time slices, so each collective takes milliseconds.
SIZES = (0, 1, 5, 513, 66_001)
CANONICAL = ("auto", "low_latency", "one_shot", "two_shot", "ordered_ring")

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ws{}".format)


def same_on_both(
    comm: rota.Communicator, source: torch.Tensor, case: str, algorithm: str, **options: Any
) -> None:
    """All-reduces `source` on the CPU and on the GPU, and compares the results."""
    on_cpu = source.clone()
    on_gpu = Guarded(source)
    on_cpus_algorithm = "one_shot" if algorithm == "low_latency" else algorithm
    comm.all_reduce(on_cpu, algorithm=on_cpus_algorithm, **options)
    comm.all_reduce(on_gpu.tensor, algorithm=algorithm, **options)
    assert_same(on_gpu.get(case), on_cpu, case)


@pytest.mark.parametrize("dtypes", [DTYPES[:4], DTYPES[4:]], ids=["floats", "integers"])
@worlds
@on_ranks()
def test_cuda_all_reduce_gives_the_bits_of_the_cpu(
    rank: Rank, dtypes: tuple[torch.dtype, ...]
) -> None:
    comm = connect(rank)
    for dtype in dtypes:
        for algorithm in (*CANONICAL, "ring"):
            for size in SIZES:
                if algorithm == "low_latency" and size * dtype.itemsize > MAX_LOW_LATENCY_BYTES:
                    continue
                make = exact_inputs if algorithm == "ring" else random_inputs
                source = make(rank.world_size, size, dtype)[rank.rank]
                case = f"{name_of(dtype)} {algorithm} size {size}"
                same_on_both(comm, source, case, algorithm, op="sum")
        for op in ops_of(dtype)[1:]:
            source = random_patterns(rank.world_size, 1025, dtype)[rank.rank]
            same_on_both(comm, source, f"{name_of(dtype)} {op}", "auto", op=op)


@pytest.mark.parametrize("world_size", [2, 3], ids="ws{}".format)
@on_ranks()
def test_cuda_all_reduce_with_a_wire_dtype_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    comm = connect(rank)
    wires = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for wire_dtype in wires:
        for op in ("sum", "avg"):
            source = random_inputs(rank.world_size, 5001, torch.float32)[rank.rank]
            case = f"{name_of(wire_dtype)} {op}"
            same_on_both(comm, source, case, "auto", op=op, wire_dtype=wire_dtype)


@on_ranks(4)
def test_cuda_all_reduce_in_groups_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    comm = connect(rank)
    for dtype in (torch.float16, torch.float32, torch.int32):
        for algorithm in ("auto", "low_latency", "one_shot", "two_shot"):
            source = random_inputs(rank.world_size, 1025, dtype)[rank.rank]
            case = f"{name_of(dtype)} {algorithm}"
            same_on_both(comm, source, case, algorithm, op="sum", group_size=2)
    source = random_inputs(rank.world_size, 5001, torch.float32)[rank.rank]
    same_on_both(comm, source, "wire", "auto", op="avg", wire_dtype=torch.float16, group_size=2)


def reduce_others(rank: Rank, **order: Any) -> None:
    comm = connect(rank)
    for dtype, size in itertools.product((torch.float16, torch.float32), (300, 5000)):
        source = random_inputs(rank.world_size, size * rank.world_size, dtype)[rank.rank]
        results = []
        for device in ("cpu", DEVICE):
            whole = source.clone().to(device)
            comm.reduce(whole, 1, **order)
            part = torch.empty(size, dtype=dtype, device=device)
            comm.reduce_scatter(part, source.to(device), "avg", **order)
            results.append((whole.cpu(), part.cpu()))
        for what, on_cpu, on_gpu in zip(("reduce", "reduce_scatter"), *results, strict=True):
            assert_same(on_gpu, on_cpu, f"{what} {name_of(dtype)} {size}")
    for wire in (Format(torch.float16, True), Format(torch.float32, False)):
        reduce_bucket_on_both(rank, comm, wire, torch.float32, 5000, **order)


@on_ranks(4)
def test_cuda_sums_in_groups_give_the_bits_of_the_cpu(rank: Rank) -> None:
    reduce_others(rank, group_size=2)


@on_ranks(5)
def test_cuda_sums_in_a_tree_give_the_bits_of_the_cpu(rank: Rank) -> None:
    comm = connect(rank)
    for dtype, algorithm in itertools.product(
        (torch.float16, torch.int32), ("auto", "low_latency", "one_shot", "two_shot")
    ):
        source = random_inputs(rank.world_size, 1025, dtype)[rank.rank]
        same_on_both(comm, source, f"{name_of(dtype)} {algorithm}", algorithm, order="tree")
    reduce_others(rank, order="tree", num_shards=16)


@on_ranks(1)
def test_logical_shards_of_a_model_on_cuda_warn_of_kernels_that_differ_from_run_to_run(
    rank: Rank,
) -> None:
    rank.init("rota")
    model = torch.nn.Linear(2, 2).to(DEVICE)
    with pytest.warns(UserWarning, match="use_deterministic_algorithms"):
        rota.LogicalShards(model, 2)
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rota.LogicalShards(model, 2)


@worlds
@on_ranks()
def test_cuda_broadcast_and_all_gather_move_every_bit(rank: Rank) -> None:
    comm = connect(rank)
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        for size in SIZES:
            case = f"{name_of(dtype)} size {size}"
            inputs = random_patterns(rank.world_size, size, dtype)
            root = rank.world_size - 1
            sent = Guarded(inputs[rank.rank])
            comm.broadcast(sent.tensor, root)
            assert_same(sent.get(case), inputs[root], f"broadcast {case}")
            gathered = Guarded(torch.zeros(size * rank.world_size).to(dtype))
            comm.all_gather(gathered.tensor, inputs[rank.rank].to(DEVICE))
            assert_same(gathered.get(case), torch.cat(inputs), f"all_gather {case}")
        comm.barrier()


@worlds
@on_ranks()
def test_cuda_reduce_gather_scatter_and_all_to_all_move_every_bit(rank: Rank) -> None:
    comm = connect(rank)
    own, world_size = rank.rank, rank.world_size
    root = world_size - 1

    def parts(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size * world_size).to(dtype)

    for dtype in (torch.float32, torch.int8):
        for size in (0, 1, 5, 513, 6001):
            case = f"{name_of(dtype)} size {size}"
            inputs = random_patterns(world_size, size * world_size, dtype)
            same_on_both(comm, inputs[own], f"before {case}", "auto", op="max")

            on_cpu, on_gpu = inputs[own].clone(), Guarded(inputs[own])
            comm.reduce(on_cpu, root, "sum")
            comm.reduce(on_gpu.tensor, root, "sum")
            assert_same(on_gpu.get(case), on_cpu, f"reduce {case}")

            gathered = Guarded(parts(size, dtype))
            part = inputs[own][:size].to(DEVICE)
            comm.gather(gathered.tensor if own == root else None, part, root)
            if own == root:
                expected = torch.cat([source[:size] for source in inputs])
                assert_same(gathered.get(case), expected, f"gather {case}")

            received = Guarded(inputs[own][:size])
            comm.scatter(received.tensor, inputs[own].to(DEVICE) if own == root else None, root)
            expected = inputs[root][size * own : size * (own + 1)]
            assert_same(received.get(case), expected, f"scatter {case}")

            exchanged = Guarded(parts(size, dtype))
            comm.all_to_all(exchanged.tensor, inputs[own].to(DEVICE))
            expected = torch.cat([source[size * own : size * (own + 1)] for source in inputs])
            assert_same(exchanged.get(case), expected, f"all_to_all {case}")
            in_place = Guarded(inputs[own])
            comm.all_to_all(in_place.tensor, in_place.tensor)
            assert_same(in_place.get(case), expected, f"all_to_all in place {case}")

    # Rank i sends 100 * i + j elements to rank j, out of and into every other element.
    splits = [100 * own + peer for peer in range(world_size)]
    sources = random_inputs(world_size, 2000, torch.float32)
    strided = torch.zeros(2 * sum(splits)).to(DEVICE)[::2]
    strided.copy_(sources[own][: sum(splits)])
    output_splits = [100 * peer + own for peer in range(world_size)]
    output = torch.zeros(2 * sum(output_splits)).to(DEVICE)[1::2]
    comm.all_to_all(output, strided, output_splits=output_splits, input_splits=splits)
    # Before rank i's part for this rank stand 100 * i + j for each j below.
    parts_of_ranks = [
        source[100 * peer * own + sum(range(own)) :][: 100 * peer + own]
        for peer, source in enumerate(sources)
    ]
    assert_same(output.cpu(), torch.cat(parts_of_ranks), "all_to_all with splits")


def gather_with_other_roots(rank: Rank) -> str:
    comm = connect(rank)
    output = torch.zeros(8).to(DEVICE)
    error, text = error_of(lambda: comm.gather(output, torch.zeros(4).to(DEVICE), rank.rank))
    return f"{error}: {text}"


def test_cuda_gather_to_other_roots_is_a_mismatch() -> None:
    # The first rank to call may hear of it from the other one.
    assert any("Mismatch" in text for text in run_ranks(2, gather_with_other_roots))


# ---- gradient buckets


def reduce_bucket_on_both(
    rank: Rank,
    comm: rota.Communicator,
    wire: Format,
    dtype: torch.dtype,
    num_elems: int,
    *,
    with_residual: bool = False,
    **options: Any,
) -> None:
    source = random_inputs(rank.world_size, num_elems, torch.float32)[rank.rank].to(dtype)
    if num_elems > 1000:
        source[17 * rank.rank + 3] = math.inf if num_elems % 2 else 1e-9
    results = []
    for device in ("cpu", DEVICE):
        bucket = source.clone().to(device)
        stats = torch.full((2,), -1.0, dtype=torch.float64).to(device)
        residual = torch.linspace(-1e-3, 1e-3, num_elems).to(device) if with_residual else None
        for _ in range(2 if with_residual else 1):
            comm.reduce_bucket(
                bucket,
                stats,
                wire_dtype=wire.dtype,
                block_scaling=wire.block_scaling,
                residual=residual,
                divisor=float(rank.world_size),
                **options,
            )
        written = [bucket] if residual is None else [bucket, residual]
        results.append((stats.cpu().tolist(), [tensor.cpu() for tensor in written]))
    (cpu_stats, on_cpu), (gpu_stats, on_gpu) = results
    case = f"{wire} {name_of(dtype)} {num_elems} {options}"
    for what, theirs, ours in zip(("bucket", "residual"), on_cpu, on_gpu, strict=False):
        assert_same(ours, theirs, f"{what} of {case}")
    assert gpu_stats[0] == cpu_stats[0], case
    if cpu_stats[0] == 0:
        assert math.isclose(gpu_stats[1], cpu_stats[1], rel_tol=1e-12), case
    else:
        assert not math.isfinite(gpu_stats[1]), case


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_cuda_reduce_bucket_gives_the_bits_of_the_cpu(rank: Rank) -> None:
    comm = connect(rank)
    for wire in FORMATS:
        for num_elems in (1, 513, 40_001):
            reduce_bucket_on_both(
                rank, comm, wire, torch.float32, num_elems, result_factor=1 / 1024
            )
    for dtype in BUCKET_DTYPES:
        reduce_bucket_on_both(rank, comm, Format(torch.float16, True), dtype, 5001)
    for algorithm in ("one_shot", "two_shot", "ordered_ring"):
        wire = Format(torch.float8_e4m3fn, True)
        reduce_bucket_on_both(rank, comm, wire, torch.float32, 40_001, algorithm=algorithm)


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_error_feedback_and_stochastic_rounding_give_the_bits_of_the_cpu(rank: Rank) -> None:
    comm = connect(rank)
    for wire in FORMATS[1:]:
        reduce_bucket_on_both(rank, comm, wire, torch.float32, 5000, with_residual=True)
        reduce_bucket_on_both(rank, comm, wire, torch.float32, 5000, stochastic_seed=7)


# ---- backend


def results_of_backend(rank: Rank, source: torch.Tensor, device: Any) -> dict[str, torch.Tensor]:
    world_size, own = rank.world_size, rank.rank
    names = ("all_reduce", "all_reduce, async", "broadcast", "reduce", "recv")
    results = {name: source.to(device, copy=True) for name in names}
    given = source.to(device)
    exchanged, shard = torch.zeros(6 * world_size).to(device), torch.zeros(6).to(device)
    gathered = torch.zeros(6 * world_size * world_size).to(device)
    uneven = [torch.zeros(2 * peer + 1).to(device) for peer in range(world_size)]
    dist.all_reduce(results["all_reduce"])
    for work in (
        dist.all_reduce(results["all_reduce, async"], async_op=True),
        dist.all_to_all_single(exchanged, given, async_op=True),
    ):
        assert work is not None
        work.wait()
    dist.broadcast(results["broadcast"], world_size - 1)
    dist.all_gather_into_tensor(gathered, given)
    dist.reduce_scatter_tensor(shard, given)
    dist.all_gather(uneven, given[: 2 * own + 1])
    dist.reduce(results["reduce"], world_size - 1)
    if own != world_size - 1:
        del results["reduce"]
    if own == 0 and world_size > 1:
        dist.send(results["recv"], 1)
    elif own == 1:
        dist.recv(results["recv"], 0)
    others = {"all_gather, other lengths": torch.cat([part.cpu() for part in uneven])}
    others |= {"all_to_all_single": exchanged, "all_gather": gathered, "reduce_scatter": shard}
    return results | others


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_backend_rota_takes_cuda_and_cpu_tensors(rank: Rank) -> None:
    init(rank)
    source = exact_inputs(rank.world_size, 6 * rank.world_size, torch.float32)[rank.rank]
    on_gpu, on_cpu = (results_of_backend(rank, source, device) for device in (DEVICE, "cpu"))
    for what, result in on_gpu.items():
        assert_same(result.cpu(), on_cpu[what], what)
    dist.barrier()
