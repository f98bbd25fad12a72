"""Random collectives: what may be asked, what must come out, and how to ask for it.

Inputs follow from the call and a number, so that every rank knows all ranks' inputs; the results
are equalities.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
import torch.distributed as dist

import rota
from oracle import DTYPES, assert_same, exact, exact_inputs, ops_of

# None, one, few, a message of a mailbox, longer than a slot, several slots.
SIZES = (0, 1, 2, 3, 64, 1000, 1001, 16 << 10, 70_000, 150_001)
SIZE_WEIGHTS = (2, 4, 4, 4, 8, 8, 8, 4, 1, 1)

OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
IN_PLACE = ("all_reduce", "reduce", "broadcast", "barrier")
INPUT_PER_RANK = ("reduce_scatter", "scatter", "all_to_all")
OUTPUT_PER_RANK = ("all_gather", "gather", "all_to_all")
COLLECTIVES = tuple(dict.fromkeys((*REDUCING, *ROOTED, *OUTPUT_PER_RANK, "barrier")))


class Call(NamedTuple):
    """What a rank asks for; ranks that ask for equal calls agree."""

    collective: str
    dtype: torch.dtype = torch.float32
    num_elems: int = 0  # of a rank's tensor, or of each of its parts
    op: str = ""
    root: int = 0


def random_call(rng: random.Random, world_size: int, collective: str = "", op: str = "") -> Call:
    """Any call, or any of a collective, or of it with this op."""
    collective = collective or rng.choice(COLLECTIVES)
    if collective == "barrier":
        return Call("barrier")
    dtype = rng.choice([dtype for dtype in DTYPES if not op or op in ops_of(dtype)])
    return Call(
        collective,
        dtype,
        rng.choices(SIZES, SIZE_WEIGHTS)[0],
        (op or rng.choice(ops_of(dtype))) if collective in REDUCING else "",
        rng.randrange(world_size) if collective in ROOTED else 0,
    )


# ---- the oracle


def inputs_of(call: Call, number: int, world_size: int) -> list[torch.Tensor]:
    """By rank; sums of them are exact in every dtype."""
    num_elems = call.num_elems * (world_size if call.collective in INPUT_PER_RANK else 1)
    inputs = exact_inputs(world_size, num_elems, call.dtype, call.op or "sum")
    return [tensor.roll(number) for tensor in inputs]


def output_before(call: Call, own_input: torch.Tensor, world_size: int) -> torch.Tensor:
    """What a rank's output holds before the call, and after one that has failed."""
    if call.collective in IN_PLACE:
        return own_input.clone()
    num_elems = call.num_elems * (world_size if call.collective in OUTPUT_PER_RANK else 1)
    return torch.full((num_elems,), 77).to(call.dtype)


def output_after(
    call: Call, inputs: list[torch.Tensor], before: torch.Tensor, rank: int
) -> torch.Tensor:
    """What rank `rank`'s output holds after a call on which all ranks agree."""
    part = slice(rank * call.num_elems, (rank + 1) * call.num_elems)
    if call.collective in ("reduce", "gather") and rank != call.root:
        return before
    match call.collective:
        case "all_reduce" | "reduce":
            return exact(inputs, call.op)
        case "reduce_scatter":
            return exact(inputs, call.op)[part]
        case "broadcast":
            return inputs[call.root]
        case "scatter":
            return inputs[call.root][part]
        case "all_gather" | "gather":
            return torch.cat(inputs)
        case "all_to_all":
            return torch.cat([tensor[part] for tensor in inputs])
    return before


# ---- the call


class Tensors(NamedTuple):
    input: torch.Tensor
    output: torch.Tensor


def call_group(
    group: dist.ProcessGroup, call: Call, tensors: Tensors, is_async: bool, is_list: bool
) -> dist.Work | None:
    """Through torch.distributed; `is_list`: through the function that takes a list, if any."""
    own, output = tensors
    options = {"group": group, "async_op": is_async}
    inputs, outputs = own.tensor_split(group.size()), output.tensor_split(group.size())
    at_root = group.rank() == call.root
    match call.collective:
        case "barrier":
            return dist.barrier(**options)
        case "all_reduce":
            return dist.all_reduce(output, OPS[call.op], **options)
        case "reduce":
            return dist.reduce(output, op=OPS[call.op], group_dst=call.root, **options)
        case "broadcast":
            return dist.broadcast(output, group_src=call.root, **options)
        case "scatter":
            parts = list(inputs) if at_root else None
            return dist.scatter(output, parts, group_src=call.root, **options)
        case "gather":
            parts = list(outputs) if at_root else None
            return dist.gather(own, parts, group_dst=call.root, **options)
        case "all_gather" if is_list:
            return dist.all_gather(list(outputs), own, **options)
        case "all_gather":
            return dist.all_gather_into_tensor(output, own, **options)
        case "reduce_scatter" if is_list:
            return dist.reduce_scatter(output, list(inputs), OPS[call.op], **options)
        case "reduce_scatter":
            return dist.reduce_scatter_tensor(output, own, OPS[call.op], **options)
        case "all_to_all" if is_list:
            return dist.all_to_all(list(outputs), list(inputs), **options)
        case "all_to_all":
            return dist.all_to_all_single(output, own, **options)
    raise ValueError(call.collective)


def call_communicator(comm: rota.Communicator, call: Call, tensors: Tensors) -> None:
    own, output = tensors
    at_root = comm.rank == call.root
    match call.collective:
        case "barrier":
            comm.barrier()
        case "all_reduce":
            comm.all_reduce(output, call.op)
        case "reduce":
            comm.reduce(output, call.root, call.op)
        case "broadcast":
            comm.broadcast(output, call.root)
        case "scatter":
            comm.scatter(output, own if at_root else None, call.root)
        case "gather":
            comm.gather(output if at_root else None, own, call.root)
        case "reduce_scatter":
            comm.reduce_scatter(output, own, call.op)
        case "all_gather":
            comm.all_gather(output, own)
        case "all_to_all":
            comm.all_to_all(output, own)


class Case:
    """A call on one rank, with its tensors.

    Args:
        number: from which the contents follow.
        place: of the rank among those that call.
    """

    def __init__(self, call: Call, number: int, place: int, world_size: int) -> None:
        self.call = call
        self._place = place
        self._inputs = inputs_of(call, number, world_size)
        own = self._inputs[place].clone()
        self._before = output_before(call, own, world_size)
        self.tensors = Tensors(own, self._before.clone())

    def check(self, what: str, *, is_done: bool = True) -> None:
        """Whether the output is right, or untouched, and the input as it was."""
        expected = self._before
        if is_done:
            expected = output_after(self.call, self._inputs, self._before, self._place)
        assert_same(self.tensors.output, expected, f"{what}: output")
        assert_same(self.tensors.input, self._inputs[self._place], f"{what}: input")
