"""The compiled extension. Users take what they need by its name in `rota`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, overload

import torch
import torch.distributed as dist

from rota._C import schedule as schedule

# What every `algorithm` argument takes; the dtypes that a gradient bucket can have, that can travel
# between ranks, and that block scaling is for, as torch spells them.
ALGORITHMS: tuple[str, ...]
BUCKET_DTYPES: tuple[str, ...]
WIRE_DTYPES: tuple[str, ...]
BLOCK_SCALED_DTYPES: tuple[str, ...]

def host_id() -> str:
    """What can share memory: the kernel's boot id and the network namespace, or ROTA_HOST_ID."""

def isa() -> str:
    """Instruction set of the element loops: "avx512", "avx2" or "portable" (see ROTA_ISA)."""

def cuda_archs() -> list[str]:
    """What the CUDA kernels were compiled for, as nvcc names it; empty in a build for the CPU.

    Machine code first, ascending ("sm_80"), then the PTX that serves newer GPUs ("compute_100").
    """

def cuda_devices() -> list[str]:
    """Names of the GPUs that the CUDA runtime sees, such as "NVIDIA H200 (sm_90)".

    Raises:
        rota.TransportError: no GPU is usable, and why, or this is a build for the CPU.
    """

def make_heap_tensor(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See rota.empty()."""

class GpuTuning:
    """What collectives on GPUs are tuned by; csrc/schedule/tuning.h is the table.

    Attributes:
        max_low_latency_bytes: up to this message "auto" is "low_latency".
        max_one_shot_bytes: of all ranks' messages together; up to there it is "one_shot", beyond
            "two_shot" (in a LocalGroup, "two_shot_in_place").
        num_channels: blocks of each rank; 0 is as many as run at the same time.
        slot_bytes: of one link in one channel, a multiple of 128.
        free_chunk_bytes: what a block of "two_shot_in_place" in a LocalGroup takes of a tensor, a
            multiple of 128.
        free_threads: threads of such a block, a multiple of 32 up to 512.
    """

    max_low_latency_bytes: int
    max_one_shot_bytes: int
    num_channels: int
    slot_bytes: int
    free_chunk_bytes: int
    free_threads: int

    def __init__(self, other: GpuTuning) -> None:
        """Copies `other`, so that the copy can be changed."""

    @property
    def provenance(self) -> str:
        """Where the row that this was copied from comes from: machine, date, command."""

def gpu_tuning(
    gpu: str, topology: Literal["local", "nvlink", "pcie"], world_size: int
) -> GpuTuning:
    """Copies the row of the tuning table that fits closest.

    Args:
        gpu: name of the device, as torch.cuda.get_device_name gives it; "" finds the row for any.
        topology: "local" for ranks of one launch on one GPU, "nvlink" where every pair of GPUs is
            joined by it, else "pcie".
        world_size: ranks, from 1 to 64.

    Raises:
        ValueError: no such topology, or no such number of ranks.
    """

def build_id() -> str:
    """The linker's checksum of this extension, in hexadecimal: tells one build from another."""

class KernelReport:
    """What the self-test of a GPU says of one kernel, in all its formats."""

    @property
    def kernel(self) -> str:
        """Such as "two_shot" or "pack"."""
    @property
    def num_formats(self) -> int:
        """Tested; of pack and unpack, pairs of the gradients' dtype and the wire format."""
    @property
    def findings(self) -> list[str]:
        """What was wrong first, in each format that failed; empty: nothing."""
    @property
    def milliseconds(self) -> float:
        """Launches, copies and comparisons, all formats together."""

def gpu_self_test(device: int) -> list[KernelReport]:
    """Runs every kernel on the GPU of this index and compares the bits with those of the CPU.

    It runs even if a record exists, and replaces the record. Ranks of one launch stand in for
    processes, so no peer is needed. Blocks; uses a stream of its own.

    Raises:
        rota.TransportError: a kernel did not finish, the CUDA runtime reported an error, or this is
            a build for the CPU.
    """

def recorded_gpu_self_test(device: int) -> list[str] | None:
    """What failed in the last self-test of this GPU, with this driver and this build.

    Returns None if there is no record. Makes no CUDA context.

    Raises:
        rota.TransportError: there is no such GPU, or this is a build for the CPU.
    """

def gpu_driver(device: int) -> str:
    """The driver's version, such as "580.65.06 (CUDA 13.0)"; "CUDA 13.0" if only that is known.

    Raises:
        rota.TransportError: there is no such GPU, or this is a build for the CPU.
    """

def block_elems(dtype: torch.dtype) -> int:
    """Elements that share one power-of-two scale when a wire dtype is block scaled: 32 or 64.

    Args:
        dtype: float16, float8_e4m3fn or float8_e5m2.
    """

class Communicator:
    """Collectives on CPU and CUDA tensors; `rota.Communicator` makes one over a process group.

    Every rank calls the same collectives in the same order. On CPU tensors a call blocks until this
    rank's part is done, unless its documentation says otherwise. On CUDA tensors it is queued on
    the current stream, and can be captured in a graph once the GPUs are joined; a later failure is
    printed, and raised by the next call. Tensors may be strided; sparse tensors, overlapping
    tensors and tensors on other devices are refused before anything moves.

    Every call raises:
        TypeError, ValueError: bad arguments; nothing has moved, and peers do not notice.
        rota.Mismatch: ranks called different collectives; nothing was written. The group stays
            usable after a mismatch of CPU tensors, not after one of CUDA tensors.
        rota.PeerFailed: a peer died, left, or raised; the group is unusable from then on.
        rota.Timeout: a peer did not come in time; the group is unusable from then on.
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
        group_size: int | None = None,
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
                "ring" sums each shard in another order, which depends on the number of elements and
                of ranks only; "auto" chooses by size from a measured table. "low_latency", for
                short CUDA tensors, gives the bits of "one_shot". One that failed a GPU's
                self-test is refused, and "auto" does not choose it.
            wire_dtype: what travels between ranks; None is the tensor's dtype. Floating, and not
                wider than the tensor's.
            hop_dtype: the dtype of partial sums on their way around the "ring", CPU tensors only;
                None is the accumulate dtype.
            async_op: return a Work at once; leave the tensor alone until the work is done. For a
                CUDA tensor its wait() makes the current stream wait.
            group_size: a divisor of the world size. The sum of each group of so many consecutive
                ranks is formed first, then those sums are added, all in the accumulate dtype: the
                order of a hierarchical all-reduce over hosts of so many ranks, with its bits. Not
                with the rings. None, 1 and the world size are the plain ascending order.
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
        group_size: int | None = None,
    ) -> dist.Work: ...
    def all_reduce_future(
        self, tensor: torch.Tensor, op: str, wire_dtype: torch.dtype | None
    ) -> torch.futures.Future[torch.Tensor]:
        """As `all_reduce(async_op=True)`, with the future of the tensor that a DDP hook returns."""

    def reduce_bucket(
        self,
        bucket: torch.Tensor,
        stats: torch.Tensor,
        *,
        wire_dtype: torch.dtype,
        block_scaling: bool,
        contribution_factor: float = 1.0,
        divisor: float = 1.0,
        result_factor: float = 1.0,
        residual: torch.Tensor | None = None,
        stochastic_seed: int | None = None,
        algorithm: str = "auto",
    ) -> None:
        """Reduces a gradient bucket in place, in one pass each way, to the same bits on every rank.

        In float32: x = bucket * contribution_factor, plus residual / result_factor where there is a
        residual. x is encoded, the decoded contributions are summed in ascending rank and divided
        by divisor, the quotient is encoded and decoded once more, multiplied by result_factor, and
        rounded to the bucket's dtype.

        To encode is to round to wire_dtype. Block scaled, each block of `block_elems(wire_dtype)`
        elements, counted from the bucket's first, is divided by a power of two before, which
        travels as one byte (E8M0, as in the OCP Microscaling specification 1.0): with amax the
        largest finite magnitude of the block, 2**e for e = clamp(floor(log2(amax)) - T, -125, 127),
        T = 7 for float8_e4m3fn and 14 for the others, so that nothing finite overflows. Inf and NaN
        arrive as such.

        A conversion, one of each contribution and one of the result, errs by at most u * |x|, or by
        half the spacing of wire_dtype below its smallest normal number where the scaled x lies
        there; u is 2**-24 for float32, 2**-11 float16, 2**-8 bfloat16, 2**-4 float8_e4m3fn, 2**-3
        float8_e5m2. Stochastic rounding errs by at most twice that.

        Args:
            bucket: any shape, strided; float32, float64, float16 or bfloat16; in and out.
            stats: contiguous float64 of 2 elements, on the bucket's device, as is residual; out:
                the number of non-finite elements of the result, and the sum of its squares, summed
                in float64.
            wire_dtype: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
            block_scaling: for float16 and float8 only.
            contribution_factor, divisor, result_factor: positive; they and their reciprocals lie in
                float32's normal range.
            residual: contiguous float32 of as many elements as bucket, in units of the result: what
                encoding this rank's contributions has lost so far; in and out. 0 where x is not
                finite.
            stochastic_seed: None rounds to nearest even. An int in [0, 2**64), a new one for each
                call, rounds to one of the two neighbours at random, to the nearer one more often.
            algorithm: as all_reduce; "ring" sums each shard in another order.
        """

    def reduce_bucket_future(
        self,
        bucket: torch.Tensor,
        stats: torch.Tensor,
        *,
        wire_dtype: torch.dtype,
        block_scaling: bool,
        contribution_factor: float = 1.0,
        divisor: float = 1.0,
        result_factor: float = 1.0,
        residual: torch.Tensor | None = None,
        stochastic_seed: int | None = None,
        algorithm: str = "auto",
    ) -> torch.futures.Future[torch.Tensor]:
        """As `reduce_bucket`, on a progress thread; returns the future of the bucket.

        `bucket`, `stats` and `residual` must not be touched before the future is done.
        """

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copies `tensor` of rank `root` into that of every rank; same shape and dtype on all."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenates every rank's `input` into `output`, in ascending rank.

        Args:
            output: contiguous, world_size times as many elements as input, of its dtype.
            input: same number of elements and dtype on every rank.
        """

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str = "sum") -> None:
        """Reduces every rank's `input`; rank i gets shard i of the result. CUDA tensors only.

        Args:
            output: contiguous; may be this rank's shard of input.
            input: contiguous, world_size times as many elements as output, of its dtype.
            op: as all_reduce.
        """

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> None:
        """Sends `tensor` to rank `peer`, which calls recv() or irecv() with the same tag.

        Messages of the same sender and tag are received in the order in which they were sent. Of a
        CPU tensor it blocks until the tensor may be changed again: a short message then waits in
        shared memory for its recv, a long one needs a receiver that waits for something in rota,
        be it another message. So both ranks of a pair may send first, whatever the length. What
        arrives before its recv is kept on the heap.

        Of a CUDA tensor it is queued on the current stream; tags are not told apart, and the GPUs
        must be joined, which takes all ranks: connect_device() does it, or any collective.

        Args:
            tensor: any shape and dtype; strided ones are packed.
            peer: another rank than this one.
            tag: 0 or more.

        Raises:
            ValueError: peer is not another rank of the group, or tag is negative.
            rota.Timeout: nobody took the message in the communicator's timeout; names the peer.
            rota.PeerFailed: the peer died, left, or failed.
        """

    def recv(self, tensor: torch.Tensor, peer: int | None = None, tag: int = 0) -> int:
        """Receives into `tensor` the next message with this tag from rank `peer`, and blocks.

        Args:
            tensor: of the dtype and number of elements that are sent; strided ones are unpacked.
            peer: None takes a message of any rank (CPU tensors only).
            tag: 0 or more.

        Returns:
            The rank that has sent it.

        Raises:
            ValueError: as send().
            rota.Mismatch: the message has another dtype or number of elements; names both sides.
                The message is dropped, nothing is written, and the group goes on.
            rota.Timeout, rota.PeerFailed: as send().
        """

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> torch.distributed.Work:
        """send() that returns at once; `tensor` must not be changed before the work is done.

        It goes on while nobody waits for it, and sooner while anybody waits for anything in rota.
        """

    def irecv(
        self, tensor: torch.Tensor, peer: int | None = None, tag: int = 0
    ) -> torch.distributed.Work:
        """recv() that returns at once; `tensor` must not be used before the work is done."""

    def connect_device(self, device: torch.device) -> None:
        """Joins the GPUs of all ranks, of which `device` is this rank's; collective, blocks.

        The first collective on CUDA tensors does it too, except in a graph capture.

        Raises:
            ValueError: the communicator has another device, or a graph is being captured.
            rota.TransportError: the GPUs cannot reach each other, and why.
        """

    @property
    def peer_access(self) -> str | None:
        """How the GPUs reach each other, such as "CUDA IPC"; None before they are joined."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def abort(self, reason: str) -> None:
        """Makes every waiting and every later call fail, on every rank, with this text."""

    def close(self) -> None:
        """Waits for what is queued, then leaves the group. Later calls raise; idempotent.

        Once GPUs are joined, it also waits until the other ranks' kernels have ended, so that none
        of them writes to memory that this rank has freed: up to 2 s for ranks that do not close.
        """

class LocalGroup:
    """See rota.LocalGroup; not in a build for the CPU."""

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        num_channels: int | None,
        timeout: timedelta,
        tuning: GpuTuning | None,
    ) -> None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_channels(self) -> int:
        """Blocks of each rank's kernels."""
    @property
    def device(self) -> torch.device: ...
    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: str = "sum",
        algorithm: str = "auto",
        group_size: int | None = None,
    ) -> None:
        """Reduces over all ranks, in place; numbers as of Communicator.all_reduce.

        Args:
            tensors: one for each rank.
            op: as Communicator.all_reduce.
            algorithm: "low_latency", "one_shot", "two_shot", "two_shot_in_place", "ordered_ring",
                "ring", "hierarchical", or "auto": what the group's tuning says, by default
                "two_shot_in_place" at every size, which waits for nobody and moves least.
            group_size: ranks per group; sums are formed within each group first, then over groups.
        """

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: str = "sum"
    ) -> None:
        """Reduces the inputs; outputs[i] becomes part i of world_size equal ones."""

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Each output becomes all inputs, one after the other."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Copies tensors[root] into all others."""

    def send_recv(self, src: int, dst: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors[src] into tensors[dst]; the other ranks' stay as they are."""

class GradientBucket:
    """See rota.GradientBucket; not in a build for the CPU."""

    def __init__(
        self, gradients: Sequence[torch.Tensor], wire_dtype: torch.dtype, block_scaling: bool
    ) -> None: ...
    def pack(
        self,
        *,
        contribution_factor: float = 1.0,
        residual: torch.Tensor | None = None,
        stochastic_seed: int | None = None,
    ) -> None:
        """Writes the gradients times contribution_factor to the wire buffer.

        Args:
            residual: contiguous float32 of num_elems elements, laid out as the wire: what encoding
                has lost is added and renewed, as reduce_bucket does.
            stochastic_seed: as of reduce_bucket.
        """

    def unpack(self, *, result_factor: float = 1.0) -> None:
        """Writes the wire buffer times result_factor to the gradients, and measures them."""

    @property
    def wire(self) -> torch.Tensor:
        """uint8 of num_wire_bytes: each gradient starts at a multiple of 512 elements."""
    @property
    def stats(self) -> torch.Tensor:
        """float64 of 2 elements, of the last unpack: non-finite results, sum of squares."""
    @property
    def num_elems(self) -> int:
        """Elements of the wire, what fills tiles up included."""
    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
    @property
    def num_wire_bytes(self) -> int: ...

class ProcessGroupRota(dist.ProcessGroup):
    """The torch.distributed backend "rota"; init_process_group makes it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot_bytes: int,
        connects_at_first_use: bool,
        make_delegate: Callable[[str], dist._Backend],
    ) -> None: ...
