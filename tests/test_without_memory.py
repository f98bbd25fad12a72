"""Tensors without memory, or with less than their shape says: an error before anything moves, on
every rank that takes part, and the group goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import rota
from ranks import Rank, error_of, on_ranks
from rota import _C
from several_hosts import PAIR, TWO_BY_TWO, of_layouts, on_layout


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, num_elems: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (num_elems,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{function} of a Wrapper")


def fake(num_elems: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(num_elems)


def freed(num_elems: int) -> torch.Tensor:
    tensor = torch.ones(num_elems)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short(num_elems: int) -> torch.Tensor:
    tensor = torch.ones(2 * num_elems)[num_elems:]
    tensor.untyped_storage().resize_(8 * num_elems - 4)
    return tensor


def cut_short_and_strided(num_elems: int) -> torch.Tensor:
    tensor = torch.ones(num_elems, 3)[:, 1]
    tensor.untyped_storage().resize_(12 * num_elems - 8)
    return tensor


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replicated(num_elems: int) -> torch.Tensor:
    return DTensor.from_local(torch.ones(num_elems), mesh(), [Replicate()], run_check=False)


# A tensor of so many float32, the error, and what its text names.
KINDS: dict[str, tuple[Callable[[int], torch.Tensor], str, str]] = {
    "meta": (lambda n: torch.ones(n, device="meta"), "TypeError", "on meta"),
    "fake": (fake, "TypeError", "FakeTensor, which has no memory of its own"),
    "wrapper": (Wrapper, "TypeError", "Wrapper, which has no memory of its own"),
    "dtensor": (replicated, "TypeError", "DTensor, which has no memory of its own; pass its .to_l"),
    "functional": (
        lambda n: torch._to_functional_tensor(torch.ones(n)),
        "TypeError",
        "plain tensor",
    ),
    "zero": (torch._efficientzerotensor, "TypeError", "zero tensor without memory; call clone()"),
    "freed": (freed, "ValueError", "of its storage, which has 0; its memory was freed"),
    "cut-short": (cut_short, "ValueError", "end at byte 64 of its storage, which has 60"),
    "strided": (cut_short_and_strided, "ValueError", "end at byte 92 of its storage, which has 88"),
}


def calls_of(
    communicator: rota.Communicator, window: rota.Window, peer: int
) -> dict[str, Callable[[torch.Tensor], object]]:
    ones, whole, stats = torch.ones(8), torch.ones(16), torch.zeros(2, dtype=torch.float64)
    wire: dict[str, Any] = {"wire_dtype": torch.float16, "block_scaling": False}
    return {
        "all_reduce": communicator.all_reduce,
        "all_reduce async": lambda t: communicator.all_reduce(t, async_op=True),
        "reduce": lambda t: communicator.reduce(t, 0),
        "broadcast": lambda t: communicator.broadcast(t, 0),
        "all_gather": lambda t: communicator.all_gather(whole, t),
        "reduce_scatter": lambda t: communicator.reduce_scatter(t, whole),
        "all_to_all": lambda t: communicator.all_to_all(t, ones),
        "all_to_all of it": lambda t: communicator.all_to_all(ones, t),
        "send": lambda t: communicator.send(t, peer),
        "isend": lambda t: communicator.isend(t, peer),
        "irecv": lambda t: communicator.irecv(t, peer),
        "recv": lambda t: communicator.recv(t),
        "reduce_bucket": lambda t: communicator.reduce_bucket(t, stats, **wire),
        "residual": lambda t: communicator.reduce_bucket(ones, stats, residual=t, **wire),
        "put": lambda t: window.put(t, peer),
        "get": lambda t: window.get(t, peer),
        "accumulate": lambda t: window.accumulate(t, peer),
        "exposed": lambda t: _C.ExposedTensor(t, 1, others_may_write=True),
        "move_storage": lambda t: _C.move_storage(t, t, copies=True),
        "checksum": _C.checksum,
        "encode": lambda t: _C.encode(torch.empty(16, dtype=torch.uint8), t, torch.float16, False),
    }


OF_ANY_BYTES = ("move_storage", "checksum", "encode")  # refuse the device in other words


@on_ranks(2)
def test_tensor_without_memory_is_refused_by_every_call_and_the_group_goes_on(rank: Rank) -> None:
    communicator = rank.communicator()
    window = rota.Window(8)
    for kind, (make, error, fact) in KINDS.items():
        for name, call in calls_of(communicator, window, 1 - rank.rank).items():
            for only in (False, True):  # all ranks make the bad call, or one
                if (only and rank.rank == 0) or (kind == "meta" and name in OF_ANY_BYTES):
                    continue
                tensor = make(8)
                raised, text = error_of(call, tensor)
                what = f"{name} of a {kind} tensor: {raised}: {text}"
                assert raised == error and fact in text and text.startswith("rota."), what
        if make in (freed, cut_short, cut_short_and_strided):  # others torch itself refuses
            for call in (dist.all_reduce, lambda t: dist.all_reduce(t, async_op=True)):
                raised, text = error_of(call, make(8))
                assert raised == error and fact in text, f"dist.all_reduce, {kind}: {text}"
        errors = [error_of(rota.Window, make(8) if rank.rank == 1 else 8)]
        assert errors[0][0] == (error if rank.rank == 1 else "TransportError"), errors
        ones = torch.ones(3)
        communicator.all_reduce(ones)
        assert ones.eq(2).all(), kind
    assert window.tensor.eq(0).all()
    dist.barrier()


@on_ranks(2)
def test_lazy_clones_and_tensors_without_elements_are_as_others(rank: Rank) -> None:
    """What has no bytes needs no memory; a lazy clone gets some where it is written."""
    communicator = rank.communicator()
    communicator.all_reduce(freed(0))
    communicator.all_gather(torch.empty(0), freed(8)[3:3])
    source = torch.ones(8)
    clone, received = torch._lazy_clone(source), torch._lazy_clone(source)
    communicator.all_reduce(clone)
    if rank.rank == 0:
        communicator.send(clone, 1)
    else:
        communicator.recv(received, 0)
        assert received.eq(2).all()
    window = rota.Window(torch._lazy_clone(source))
    window.tensor.fill_(7)
    assert clone.eq(2).all() and source.eq(1).all()
    dist.barrier()


# ---- between a call and its start ----------------------------------------------------------------


def replace(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(3)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@of_layouts(PAIR, TWO_BY_TWO)
@on_layout()
def test_memory_lost_while_a_call_is_queued_is_an_error_on_every_rank(rank: Rank) -> None:
    """The last rank's tensors lose their memory while its calls wait for an earlier one."""
    rank.init()
    communicator = rota.Communicator()
    store = dist.distributed_c10d._get_default_store()
    n, me = rank.world_size, rank.rank
    loses = me == n - 1
    stats, wire = torch.zeros(2, dtype=torch.float64), {"wire_dtype": torch.float16}

    def reduce_bucket(tensor: torch.Tensor) -> Any:
        return communicator.reduce_bucket_future(tensor, stats, block_scaling=False, **wire)

    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda t: dist.all_reduce(t, async_op=True),
        "all_gather": lambda t: dist.all_gather_into_tensor(
            torch.empty(n * 4 * n), t, async_op=True
        ),
        "all_to_all": lambda t: dist.all_to_all_single(torch.empty(4 * n), t, async_op=True),
        "reduce_bucket": reduce_bucket,
    }
    for number, ((name, call), lose) in enumerate(
        (each, lose) for each in calls.items() for lose in (free, replace)
    ):
        barrier = communicator.all_reduce if name == "reduce_bucket" else dist.all_reduce
        if not loses:
            store.wait([f"lost {number}"])
        first = barrier(torch.ones(1), async_op=True)
        tensor = torch.ones(4 * n)
        work = call(tensor)
        if loses:
            lose(tensor)
            store.set(f"lost {number}", "")
        first.wait()
        raised, text = error_of(work.wait)
        what = f"{name}, {lose.__name__}: {raised}: {text}"
        if loses:
            assert raised == "ValueError", what
            facts = ("has 0; its memory was freed",) if lose is free else ("replaced", "3")
            assert any(fact in text for fact in facts), what
        else:
            assert raised in ("Mismatch", "RuntimeError") and "ranks disagree" in text, what
            assert f"rank {n - 1} called" in text and "withdrew it" in text, what
        again = torch.ones(4 * n)
        barrier(again)
        assert again.eq(n).all(), f"the call after {what}"
