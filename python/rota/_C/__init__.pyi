"""The compiled extension. Users take what they need by its name in `rota`."""

from datetime import timedelta
from typing import Literal, overload

import torch
import torch.distributed as dist

from rota._C import schedule as schedule

def host_id() -> str:
    """What can share memory: the kernel's boot id and the network namespace, or ROTA_HOST_ID."""

def isa() -> str:
    """Instruction set of the element loops: "avx512", "avx2" or "portable" (see ROTA_ISA)."""

class Communicator:
    """Collectives on CPU tensors; `rota.Communicator` makes one over a process group.

    All calls block until this rank's part is done unless they say otherwise, and must come in the
    same order on every rank. Tensors may be strided; sparse, overlapping and non-CPU ones are
    refused before anything moves.

    Raises, all of them:
        TypeError, ValueError: unusable arguments; nothing has moved and peers know nothing of it.
        rota.Mismatch: ranks called different collectives; nothing was written, the group lives on.
        rota.PeerFailed: a peer died, left, or raised; the group is dead.
        rota.Timeout: a peer did not come in time; the group is dead.
        rota.RotaError: the communicator is closed, aborted by this rank, or belongs to the parent
            of a fork. After any other failure, later calls raise the same type as the first.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot_bytes: int,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        wire_dtype: torch.dtype | None = None,
        hop_dtype: torch.dtype | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """Reduces `tensor` over all ranks, in place, with the same bits on every rank.

        Contributions are rounded once to the wire dtype, summed in ascending rank in the accumulate
        dtype (float32 for 16- and 8-bit floats, otherwise the dtype itself; integers wrap), and the
        sum is rounded once to the wire dtype.

        Args:
            tensor: any shape; float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2,
                uint8, int8, int16, int32, int64 or bool.
            op: "sum", "product", "min", "max"; "avg" for floats; "band", "bor", "bxor" for integers
                and bool.
            algorithm: "one_shot", "two_shot" and "ordered_ring" give the same bits as each other;
                "ring" sums each piece in another order; "auto" chooses by size from a measured
                table.
            wire_dtype: what travels between ranks; None is the tensor's dtype. Floating, and not
                wider than the tensor's.
            hop_dtype: for "ring", what partial sums travel in; None is the accumulate dtype.
            async_op: return a Work at once; the tensor must not be touched before it is done.
        """

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        wire_dtype: torch.dtype | None = None,
        hop_dtype: torch.dtype | None = None,
        *,
        async_op: Literal[True],
    ) -> dist.Work: ...
    def all_reduce_future(
        self, tensor: torch.Tensor, op: str, wire_dtype: torch.dtype | None
    ) -> torch.futures.Future[torch.Tensor]:
        """As `all_reduce(async_op=True)`, with the future of the tensor that a DDP hook returns."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copies `tensor` of rank `root` into that of every rank; same shape and dtype on all."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenates every rank's `input` into `output`, in ascending rank.

        Args:
            output: contiguous, world_size times as many elements as input, of its dtype.
            input: same number of elements and dtype on every rank.
        """

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def abort(self, reason: str) -> None:
        """Makes every waiting and every later call fail, on every rank, with this text."""

    def close(self) -> None:
        """Waits for what is queued, then leaves the group. Later calls raise; idempotent."""

class ProcessGroupRota(dist.ProcessGroup):
    """The torch.distributed backend "rota"; init_process_group makes it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot_bytes: int,
    ) -> None: ...
