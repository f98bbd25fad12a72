"""The operations that are measured, as one table. Needs no package, since MPI's ranks read it too.

Roots are rank 0. A message has the size that nccl-tests gives it: that of the tensor with the parts
of all ranks, or of the one tensor where there are no parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Call = Callable[..., object]


@dataclass(frozen=True)
class Operation:
    """What the ranks have before and after one collective.

    Args:
        in_place: one tensor is input and output, without parts.
        input_parts, output_parts: that side has a part for each rank.
        at_root: only rank 0 gets a result.
        busbw: busbw over algbw for n ranks (nccl-tests, doc/PERFORMANCE.md): "1", "2(n-1)/n" or
            "(n-1)/n".
    """

    in_place: bool = False
    input_parts: bool = False
    output_parts: bool = False
    at_root: bool = False
    busbw: str = "(n-1)/n"

    def num_parts(self, num_ranks: int) -> int:
        """What a message's number of elements must be a multiple of."""
        return num_ranks if self.input_parts or self.output_parts else 1

    def input_elems(self, num_elems: int, num_ranks: int) -> int:
        return num_elems if self.in_place or self.input_parts else num_elems // num_ranks

    def output_elems(self, num_elems: int, num_ranks: int) -> int:
        return num_elems if self.in_place or self.output_parts else num_elems // num_ranks

    def busbw_factor(self, num_ranks: int) -> float:
        share = (num_ranks - 1) / num_ranks
        return {"1": 1.0, "(n-1)/n": share, "2(n-1)/n": 2 * share}[self.busbw]


OPERATIONS = {
    "all_reduce": Operation(in_place=True, busbw="2(n-1)/n"),
    "reduce": Operation(in_place=True, at_root=True, busbw="1"),
    "reduce_scatter": Operation(input_parts=True),
    "broadcast": Operation(in_place=True, busbw="1"),
    "all_gather": Operation(output_parts=True),
    "gather": Operation(output_parts=True, at_root=True),
    "scatter": Operation(input_parts=True),
    "all_to_all": Operation(input_parts=True, output_parts=True),
    "send_recv": Operation(in_place=True, busbw="1"),  # from rank 0 to rank 1 and back
    "one_way": Operation(in_place=True, busbw="1"),  # only from rank 0 to rank 1
    "barrier": Operation(in_place=True),
}
MESSAGES = ("send_recv", "one_way")  # between two ranks


def message_call(op: str, rank: int, message: object, send: Call, recv: Call) -> Call:
    """One call of `op`, one of MESSAGES, on this rank.

    What differs between the ranks is settled here and not in the call, which is timed: asking torch
    for the rank takes as long as a short message.

    Args:
        send, recv: called with the message and the other rank.
    """
    if op == "one_way":
        return partial(send, message, 1) if rank == 0 else partial(recv, message, 0)
    first, second = (send, recv) if rank == 0 else (recv, send)
    return partial(call_both, partial(first, message, 1 - rank), partial(second, message, 1 - rank))


def call_both(first: Call, second: Call) -> None:
    first()
    second()
