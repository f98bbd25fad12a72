"""rota.ops: torch.compile must not drop, split or reorder collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rota
from ranks import Rank, check_error, error_of, on_ranks

WORLD_SIZE = 2
# inductor starts a C++ compiler for each graph, and a rank may wait for the other's.
TIMEOUT_S = 300.0


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # more threads would start processes
    # Vector instructions change no order of collectives, and their headers take g++ seconds.
    torch._inductor.config.cpp.vec_isa_ok = False
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def small_integers(rank: int, *shape: int) -> Tensor:
    """float32 tensor whose sums and averages over two ranks are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, shape, generator=generator).float()


class Recorder:
    """Records and forwards collectives; registered by name, as `rota.ops` looks it up."""

    def __init__(self, communicator: rota.Communicator) -> None:
        self._communicator = communicator
        self.world_size, self.rank = communicator.world_size, communicator.rank
        self.name = "recorder"
        self.calls: list[str] = []
        rota.communicator._by_name[self.name] = self

    def all_reduce(self, tensor: Tensor, op: str, *args: Any) -> None:
        self.calls.append(f"{op} {tensor.numel()}")
        self._communicator.all_reduce(tensor, op, *args)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self.calls.append(f"broadcast {tensor.numel()}")
        self._communicator.broadcast(tensor, root)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self.calls.append(f"all_gather {tensor.numel()}")
        self._communicator.all_gather(output, tensor)

    def barrier(self) -> None:
        self.calls.append("barrier")
        self._communicator.barrier()


# -------------------------------------------------------------------------------------------------


@on_ranks(WORLD_SIZE, timeout_s=TIMEOUT_S)
def test_operators_opcheck_passes(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    name = communicator.name
    order = torch.zeros(1)
    for shape in ((), (3, 5)):
        tensor = torch.ones(shape)
        all_reduce_args = (tensor, order, "sum", "two_shot", torch.float16, name)
        torch.library.opcheck(torch.ops.rota.all_reduce, all_reduce_args)
        torch.library.opcheck(torch.ops.rota.all_reduce_, all_reduce_args)
        torch.library.opcheck(torch.ops.rota.broadcast, (tensor, order, 1, name))
        torch.library.opcheck(torch.ops.rota.broadcast_, (tensor, order, 1, name))
        torch.library.opcheck(torch.ops.rota.all_gather, (tensor, order, name))
    torch.library.opcheck(torch.ops.rota.barrier, (order, name))


def _everything(x: Tensor, y: Tensor, communicator: rota.Communicator) -> list[Tensor]:
    """Every kind of use: on inputs, intermediates, and strided, expanded and empty views.

    `* 1` and clone() are there because inductor removes them.
    """
    ops = rota.ops
    ops.all_reduce_(x, communicator)
    ops.broadcast_(y[:, 1], communicator, 1)
    z = x * 2 + y
    return [
        ops.all_reduce(z, communicator, "max", "ring"),
        ops.all_reduce(z.t(), communicator, "avg", wire_dtype=torch.float16),
        ops.all_reduce(z[:1].expand(3, 5), communicator) + 1,
        ops.all_reduce_(z[:, ::2] * 1, communicator),
        ops.all_reduce_(z[1:].clone(), communicator),
        ops.all_reduce(z[1:], communicator),
        ops.broadcast_(z[2:] * 1, communicator),
        ops.all_gather(z[1:] * 1, communicator),
        ops.broadcast(z, communicator),
        ops.all_gather(z, communicator),
        ops.all_gather(z.t(), communicator),
        ops.all_gather(z.sum(), communicator),
        ops.all_gather(z[:0], communicator),
        z,
    ]


def _check_same_as_eager(rank: Rank, backend: str) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    inputs = small_integers(rank.rank, 3, 5), small_integers(rank.rank + 2, 3, 5)
    own = [tensor.clone() for tensor in inputs]
    expected = _everything(*inputs, communicator) + list(inputs)
    got = compiled(_everything, backend)(*own, communicator) + own
    for number, (of_compiled, of_eager) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(of_compiled, of_eager), number
        assert of_compiled.stride() == of_eager.stride(), number


@on_ranks(WORLD_SIZE)
def test_eager_operators_reduce_broadcast_and_gather(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    ranks = range(WORLD_SIZE)
    own = small_integers(rank.rank, 3, 5)
    everyones = torch.stack([small_integers(other, 3, 5) for other in ranks])
    ops = rota.ops
    assert torch.equal(ops.all_reduce(own, communicator), everyones.sum(0))
    assert torch.equal(ops.all_reduce(own, communicator, "avg"), everyones.mean(0))
    assert torch.equal(ops.broadcast(own, communicator, 1), everyones[1])
    assert torch.equal(ops.all_gather(own, communicator), everyones.flatten(0, 1))
    assert torch.equal(own, everyones[rank.rank])  # the input was not changed
    assert ops.all_reduce_(own, communicator) is own
    assert torch.equal(own, everyones.sum(0))
    own = small_integers(rank.rank, 3, 5)
    assert ops.broadcast_(own, communicator, 1) is own
    assert torch.equal(own, everyones[1])


def _many_unrelated(tensors: list[Tensor], rank: int, communicator: Recorder) -> Tensor:
    """Collectives that share no data, with mostly unused results; graphs differ between ranks."""
    comm: Any = communicator
    if rank == 0:
        tensors[3] = tensors[3].sin().cos()  # work that inductor tends to postpone
    rota.ops.all_reduce(tensors[0] * 2, comm)
    rota.ops.all_reduce_(tensors[3], comm, "max")
    rota.ops.barrier(comm)
    rota.ops.all_gather(tensors[1], comm)
    rota.ops.broadcast_(tensors[2], comm)
    rota.ops.all_reduce_(tensors[1], comm, "min")
    rota.ops.broadcast(tensors[0], comm)
    big = torch.cat([tensors[2], tensors[2]]) @ torch.ones(2 * len(tensors[2]))
    rota.ops.all_reduce(tensors[4], comm, "avg")
    return big


_IN_ORDER = ["sum 1", "max 4", "barrier", "all_gather 2", "broadcast 3", "min 2", "broadcast 1"]


def _check_unrelated_run_in_order(rank: Rank, backend: str) -> None:
    recorder = Recorder(rank.communicator(timeout_s=TIMEOUT_S))
    tensors = [torch.ones(length) for length in (1, 2, 3, 4, 5)]
    compiled(_many_unrelated, backend)(tensors, rank.rank, recorder)
    assert recorder.calls == [*_IN_ORDER, "avg 5"]


def _check_dynamic_shapes_are_one_graph(rank: Rank, backend: str) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    num_graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        rota.ops.all_reduce_(x, communicator)
        return rota.ops.all_gather(x, communicator), rota.ops.all_reduce(x[1:] * 2, communicator)

    run = compiled(step, counting, dynamic=True)
    for length in (4, 7, 1000, 70_000):
        x = torch.full((length, 3), float(rank.rank + 1))
        gathered, doubled = run(x)
        assert x.eq(3).all() and gathered.shape == (WORLD_SIZE * length, 3)
        assert gathered.eq(3).all() and doubled.shape == (length - 1, 3) and doubled.eq(12).all()
    assert num_graphs == 1


# -------------------------------------------------------------------------------------------------
# Gradients


class _Enter(torch.autograd.Function):
    """Enters a tensor-parallel layer; the backward pass sums the gradients of all shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: rota.Communicator) -> Tensor:
        ctx.communicator = communicator
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rota.ops.all_reduce(gradient, ctx.communicator), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: rota.Communicator) -> Tensor:
        return rota.ops.all_reduce(x, communicator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _tensor_parallel(
    x: Tensor, layers: list[tuple[Tensor, Tensor]], communicator: rota.Communicator
) -> Tensor:
    for into, out_of in layers:
        x = x + _Leave.apply(
            _Enter.apply(x, communicator).matmul(into).relu() @ out_of, communicator
        )
    return x.square().sum()


def _check_tensor_parallel_layers_have_the_gradients_of_whole_ones(
    rank: Rank, backend: str
) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    # All ranks generate the same weights, and each uses its own part.
    generator = torch.Generator().manual_seed(0)
    width, half = 8, 8 // WORLD_SIZE
    own = slice(rank.rank * half, (rank.rank + 1) * half)
    whole, parts = [], []
    for _ in range(2):
        into, out_of = (torch.randn(width, width, generator=generator) * 0.3 for _ in range(2))
        whole.append((into.requires_grad_(), out_of.requires_grad_()))
        parts.append(
            tuple(part.detach().clone().requires_grad_() for part in (into[:, own], out_of[own, :]))
        )
    x = torch.randn(4, width, generator=generator)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()

    expected = inputs[0]
    for into, out_of in whole:
        expected = expected + (expected @ into).relu() @ out_of
    expected = expected.square().sum()
    expected.backward()
    run = compiled(_tensor_parallel, backend)
    loss = run(inputs[1], parts, communicator)
    loss.backward()

    # The sum over shards has another order of additions than the product with the whole matrix.
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for (into, out_of), (own_into, own_out_of) in zip(whole, parts, strict=True):
        torch.testing.assert_close(own_into.grad, into.grad[:, own])
        torch.testing.assert_close(own_out_of.grad, out_of.grad[own, :])


_COMPILED_CHECKS = (
    _check_same_as_eager,
    _check_unrelated_run_in_order,
    _check_dynamic_shapes_are_one_graph,
    _check_tensor_parallel_layers_have_the_gradients_of_whole_ones,
)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@on_ranks(WORLD_SIZE, timeout_s=TIMEOUT_S)
def test_compiled_collectives_pass_every_check(rank: Rank, backend: str) -> None:
    """On one set of ranks: importing a compiler takes a rank longer than most checks. The traceback
    of a failure names the check."""
    for check in _COMPILED_CHECKS:
        torch._dynamo.reset()
        check(rank, backend)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@on_ranks(WORLD_SIZE, timeout_s=TIMEOUT_S)
def test_gradients_are_those_of_the_sum_of_all_losses(rank: Rank, backend: str) -> None:
    """Rank r's loss is weights[r] * outputs; gradients must be those of the sum of both losses."""
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    weights = [small_integers(other + 7, 6, 2) for other in range(WORLD_SIZE)]
    total = weights[0] + weights[1]
    own = weights[rank.rank]

    def gradient_of(call: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        x = small_integers(rank.rank, 3, 2).requires_grad_()
        run = compiled(lambda x: (call(x) * weight).sum(), backend)
        run(x).backward()
        return x.grad

    def in_place(x: Tensor) -> Tensor:
        return rota.ops.all_reduce_(x * 2, communicator)

    ops = rota.ops
    short, short_total = own[:3], total[:3]
    sums = gradient_of(lambda x: ops.all_reduce(x, communicator), short)
    assert torch.equal(sums, short_total)
    averages = gradient_of(lambda x: ops.all_reduce(x, communicator, "avg"), short)
    assert torch.equal(averages, short_total / 2)
    assert torch.equal(gradient_of(in_place, short), 2 * short_total)
    broadcast = gradient_of(lambda x: ops.broadcast(x, communicator, 1), short)
    assert torch.equal(broadcast, short_total * (rank.rank == 1))
    gathered = gradient_of(lambda x: ops.all_gather(x, communicator), own)
    assert torch.equal(gathered, total[3 * rank.rank : 3 * rank.rank + 3])


@on_ranks(WORLD_SIZE)
def test_gradient_that_would_be_wrong_raises(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    x = torch.ones(3, requires_grad=True)
    largest = rota.ops.all_reduce(x, communicator, "max").sum()

    y = x * 1
    square = y.square()  # saves y for its backward pass
    with torch.no_grad():
        rota.ops.all_reduce_(y, communicator)
    assert error_of(largest.backward) == (
        "NotImplementedError",
        "rota.ops.all_reduce: op 'max' has no gradient, expected 'sum' or 'avg'; detach the tensor",
    )
    check_error(error_of(square.sum().backward), "RuntimeError", "modified by an inplace operation")


# -------------------------------------------------------------------------------------------------
# Names and failures


@on_ranks(WORLD_SIZE)
def test_communicator_names_are_unique_and_equal_on_all_ranks(rank: Rank) -> None:
    rank.init("gloo")
    alone = [dist.new_group([other]) for other in range(WORLD_SIZE)]
    everyone = dist.new_group()
    communicators = [rota.Communicator(), rota.Communicator(everyone), rota.Communicator()]
    own = rota.Communicator(alone[rank.rank])
    names = [communicator.name for communicator in communicators]
    assert len({*names, own.name}) == 4
    dist.all_gather_object(of_ranks := [None] * WORLD_SIZE, names)
    assert of_ranks == [names] * WORLD_SIZE


@on_ranks(WORLD_SIZE)
def test_operator_whose_communicator_is_gone_raises(rank: Rank) -> None:
    gone, living = rank.communicator(), rank.communicator()
    name = gone.name
    gone.barrier()
    del gone
    dead = error_of(torch.ops.rota.barrier, torch.zeros(1), name)
    living.close()
    closed = error_of(rota.ops.all_reduce_, torch.ones(1), living)
    check_error(dead, "RotaError", "there is no communicator '", "; keep a reference to it")
    assert closed == ("RotaError", "rota: this communicator is closed; make a new one")


@on_ranks(WORLD_SIZE, timeout_s=TIMEOUT_S)
def test_compiled_collectives_that_differ_raise_mismatch(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=TIMEOUT_S)
    run = compiled(lambda x: rota.ops.all_reduce(x * 2, communicator), "aot_eager")
    check_error(error_of(run, torch.ones(3 + rank.rank)), "Mismatch", "ranks disagree")
