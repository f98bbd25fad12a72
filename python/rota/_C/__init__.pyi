"""The compiled extension. Users import its public names from `rota`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, overload

import torch
import torch.distributed as dist

from rota._C import schedule as schedule
from rota.engine import ChooseEngine

# The values of every `algorithm` argument; the dtypes (torch's names) of gradient buckets, of the
# wire, and of block scaling.
ALGORITHMS: tuple[str, ...]
BUCKET_DTYPES: tuple[str, ...]
WIRE_DTYPES: tuple[str, ...]
BLOCK_SCALED_DTYPES: tuple[str, ...]

def host_id() -> str:
    """Equal for processes that can share memory: boot id and network namespace, or ROTA_HOST_ID."""

def numa_node() -> int | None:
    """The NUMA node that this process is bound to, or ROTA_NUMA_NODE.

    None if it is not bound to the CPUs of one node, or if only one node has CPUs.
    """

def available_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its memory cgroups."""

def isa() -> str:
    """Instruction set of the element loops: "avx512", "avx2" or "portable" (see ROTA_ISA)."""

def cuda_archs() -> list[str]:
    """The architectures of the CUDA kernels, by nvcc's names; empty in a build for the CPU.

    Machine code first, ascending ("sm_80"), then the PTX for newer GPUs ("compute_100").
    """

def cuda_devices() -> list[str]:
    """Names of the GPUs that the CUDA runtime sees, such as "NVIDIA H200 (sm_90)".

    Raises rota.TransportError, which says why, if none is usable.
    """

def make_heap_tensor(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See rota.empty()."""

LEAF_ELEMS: int  # pieces of parameters begin at multiples of it (csrc/schedule/pieces.h)
TILE_ELEMS: int
SHARD_STATS: int
SQUARES_UNIT_EXPONENT: int

class UpdateStep:
    """One step of an optimizer, with what is the same for all elements of a parameter; the fields
    are explained in csrc/cpu/element_loops.h."""

    def __init__(
        self,
        *,
        is_adam: bool,
        gradient_factor: float = 1.0,
        l2: float = 0.0,
        kept: float = 1.0,
        size: float,
        momentum: float = 0.0,
        fresh: float = 1.0,
        beta2: float = 0.0,
        fresh_square: float = 0.0,
        correction: float = 1.0,
        eps: float = 0.0,
        is_nesterov: bool = False,
        is_first: bool = False,
    ) -> None: ...

class ShardedBucket:
    """A bucket of parameters whose elements the ranks own in pieces.

    Args:
        parameters: dense CPU tensors of one dtype, which lie in the bucket one behind the other.
        pieces: int64, rows of (begin in the bucket, number of elements, owner, number of the first
            tile among those of all parameters), in the order of the bucket; each in one parameter.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], pieces: torch.Tensor, rank: int, world_size: int
    ) -> None: ...
    @property
    def sums(self) -> torch.Tensor:
        """float32, of this rank's pieces in turn, each padded to whole tiles."""

    def set_state(
        self,
        piece: int,
        *,
        parameters: torch.Tensor | None = None,
        momentum: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
        largest: torch.Tensor | None = None,
    ) -> None:
        """The state of one of this rank's pieces: contiguous float32, as long as the piece. With
        `parameters` these are updated, and then rounded to the parameter's dtype."""

class HeapPool:
    """Tensors of rota.empty()'s memory, which is kept for the next tensor of the same length: new
    memory must be zeroed, and mapped by every rank. Thread-safe."""

    def __init__(self) -> None: ...
    def empty(self, num_elems: int, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor of any values; raises as rota.empty()."""

def move_storage(tensor: torch.Tensor, place: torch.Tensor, *, copies: bool) -> bool:
    """Moves a CPU tensor's storage onto the bytes of another tensor, which it keeps alive.

    With `copies` its contents, too; otherwise it takes what it finds at `place`, which is as long
    and contiguous. False if nothing was done: the memory is not torch's own, nor from an earlier
    call, or something else may use it where it is, as for rota.Window. Autograd and DDP may.
    """

def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the bytes of a contiguous CPU tensor; against damage, not against forgery."""

def check_messages_apart(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if a message that is received overlaps another that starts with it."""

def copy_with_checksum(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Copies a contiguous CPU tensor into one of as many bytes; returns checksum(src)."""

def encoded_bytes(num_elems: int, wire_dtype: torch.dtype, block_scaling: bool) -> int:
    """The bytes of num_elems elements in a wire format: its numbers, then scales of blocks."""

def encode(
    bytes: torch.Tensor, values: torch.Tensor, wire_dtype: torch.dtype, block_scaling: bool
) -> None:
    """Rounds contiguous float32 values, once and to nearest, into encoded_bytes() bytes (uint8)."""

def decode(
    values: torch.Tensor, bytes: torch.Tensor, wire_dtype: torch.dtype, block_scaling: bool
) -> None:
    """The exact inverse of encode() for what it has stored."""

class ExposedTensor:
    """A CPU tensor of this process that other processes of the host can open by its address.

    Beside it are words for whoever uses it: 64-bit numbers that only grow. Whoever sees a published
    word also sees all that its writer has written before.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        num_words: int,
        others_may_write: bool,
        *,
        torch_holds_it: bool = False,
    ) -> None:
        """Moves the tensor's storage to shared memory, as rota.Window describes.

        torch_holds_it: in a call of torch's, so that only other tensors that share its storage show
        that something else may use its memory.
        """

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def address(self) -> str:
        """What OpenedTensor takes; valid until this is closed or destroyed."""
    def load(self, word: int) -> int: ...
    def publish(self, word: int, value: int) -> None:
        """Sets a word and wakes whoever waits for it. Only one process may publish a word."""
    def close(self) -> None:
        """Refuses further openers; those that exist see it closed and keep their mapping."""

class OpenedTensor:
    """Another process's ExposedTensor, mapped."""

    def __init__(self, address: str, who: str, timeout: timedelta) -> None:
        """Connects and maps. Blocks for less than a millisecond unless the owner, `who`, is busy.

        Raises rota.TransportError if the owner has ended or closed it, and rota.Timeout if its
        process does not answer.
        """

    @property
    def pid(self) -> int: ...
    @property
    def is_open(self) -> bool:
        """Whether its owner runs and has not closed it."""
    @property
    def bytes(self) -> torch.Tensor:
        """The tensor's bytes (uint8), in place; writing crashes unless others may write."""
    def load(self, word: int) -> int: ...
    def wait(self, word: int, value: int, timeout: timedelta) -> bool:
        """Blocks until the word is at least `value`; False if it is not within the timeout.
        rota.PeerFailed: the owner has ended or closed it before."""

class WindowService:
    """Serves ranks of other hosts, and asks them, over a backend of its own; see rota.Window."""

    def __init__(
        self, backend: dist._Backend, hosts: Sequence[str], rank: int, number: int
    ) -> None: ...
    @property
    def is_usable(self) -> bool:
        """Whether no rank of another host is lost."""

class Window:
    """See rota.Window, which makes one. Offsets count elements of the window."""

    def __init__(
        self,
        own: ExposedTensor,
        rank: int,
        others: Sequence[OpenedTensor | None],
        num_channels: int,
        timeout: timedelta,
        service: WindowService | None = None,
        number: int = 0,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def put(self, tensor: torch.Tensor, rank: int, offset: int = 0) -> None:
        """Copies `tensor` into rank `rank`'s window, from element `offset` on. Does not wait.

        Args:
            tensor: any shape, the window's dtype, on the CPU; strided tensors are packed first.
            rank: of the target, this one included.

        Raises:
            TypeError, ValueError: another dtype or device, or elements outside the window; nothing
                was written.
            rota.PeerFailed: the target has died or closed its window.
            rota.RotaError: this window is closed, or belongs to the parent process.
        """
    def get(self, tensor: torch.Tensor, rank: int, offset: int = 0) -> None:
        """Fills `tensor` from rank `rank`'s window. Does not wait; raises as put().

        The memory of a rank that has died can still be read.
        """
    def accumulate(
        self,
        tensor: torch.Tensor,
        rank: int,
        offset: int = 0,
        wire_dtype: torch.dtype | None = None,
        block_scaling: bool | None = None,
    ) -> None:
        """Adds `tensor` to rank `rank`'s window, atomically in each chunk of 64 KiB.

        The window must be float32, float64 or of integers, in which sums are kept. Blocks while
        other ranks add to the same chunk.

        Args:
            wire_dtype: rounds each element of the contribution first, as on its way to another
                host; for float32 windows. None: no rounding.
            block_scaling: as in `rota.HookState`, from the first element of `tensor` on.

        Raises: as put(), and rota.Timeout.
        """
    def view(self, rank: int) -> torch.Tensor:
        """Rank `rank`'s tensor, in place; mapped for as long as the view lives."""
    def signal(self, rank: int, channel: int = 0) -> None:
        """Adds one to the signals from this rank at rank `rank`. Does not wait; raises as put()."""
    def wait_signal(self, rank: int, channel: int = 0, timeout: timedelta | None = None) -> None:
        """Blocks until the next signal from rank `rank`; each wait takes one.

        Raises:
            rota.PeerFailed: the rank has died or closed its window, and has sent no more signals.
            rota.Timeout: none came within the timeout (None: the window's).
        """
    def wait_any_signal(
        self, ranks: Sequence[int], channel: int = 0, timeout: timedelta | None = None
    ) -> int:
        """Blocks until one of at most 128 ranks has sent a signal, takes it and returns the rank.

        Of several, the first in `ranks`. Ranks that have died are ignored unless all have.
        """
    def num_signals(self, rank: int, channel: int = 0) -> int:
        """Signals from rank `rank` that no wait has taken."""
    def is_alive(self, rank: int) -> bool:
        """Whether the rank's process runs and its window is open."""
    def close(self) -> None:
        """Ends this rank's part: accesses to it fail on other ranks, and any call here. Idempotent.

        Not collective. Views stay valid.
        """

class GpuTuning:
    """Tuning parameters of collectives on GPUs: a row of the table in csrc/schedule/tuning.h, which
    explains them. Slots and chunks are multiples of 128 bytes, threads of 32 up to 512."""

    max_low_latency_bytes: int
    max_one_shot_bytes: int
    num_channels: int
    slot_bytes: int
    free_chunk_bytes: int
    free_threads: int

    def __init__(self, other: GpuTuning) -> None:
        """Copies `other`; the copy can be changed."""

    @property
    def provenance(self) -> str:
        """The origin of the table's row that this was copied from: machine, date, command."""

def gpu_tuning(
    gpu: str, topology: Literal["local", "nvlink", "pcie"], world_size: int
) -> GpuTuning:
    """Copies the closest row of the tuning table.

    Args:
        gpu: name of the device, as torch.cuda.get_device_name gives it; "" finds the row for any.
        topology: "local" for ranks of one launch on one GPU, "nvlink" if it connects every pair of
            GPUs, else "pcie".
        world_size: ranks, from 1 to 64.

    Raises:
        ValueError: unknown topology, or world_size out of range.
    """

def build_id() -> str:
    """The linker's checksum of this extension, in hexadecimal; identifies the build."""

class KernelReport:
    """The self-test's results for one kernel on a GPU, in all its formats."""

    @property
    def kernel(self) -> str:
        """The kernel's name, such as "two_shot" or "pack"."""
    @property
    def num_formats(self) -> int:
        """Formats tested; for pack and unpack, pairs of the gradients' dtype and wire format."""
    @property
    def findings(self) -> list[str]:
        """The first error in each format that failed; empty if none failed."""
    @property
    def milliseconds(self) -> float:
        """Time of launches, copies and comparisons, all formats together."""

def gpu_self_test(device: int) -> list[KernelReport]:
    """Runs every kernel on the GPU with this index and compares the bits with the CPU's.

    It runs even if a record exists, and replaces the record. Ranks of one launch act as the
    processes, so no peer is needed. Blocks; uses its own stream. Raises rota.TransportError if a
    kernel does not finish.
    """

def recorded_gpu_self_test(device: int) -> list[str] | None:
    """The failures in the last self-test of this GPU, with this driver and this build; None if
    there is no record. Makes no CUDA context."""

def gpu_driver(device: int) -> str:
    """The driver's version, such as "580.65.06 (CUDA 13.0)"; "CUDA 13.0" if only that is known."""

def failed_future(error: Exception) -> torch.futures.Future[torch.Tensor]:
    """A future for DDP to wait for, whose wait() raises the error."""

def block_elems(dtype: torch.dtype) -> int:
    """Elements that share one power-of-two scale in a narrow wire dtype with scaled blocks."""

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
        choose_engine: ChooseEngine | None = None,
        inter_wire_dtype: torch.dtype | None = None,
        inter_block_scaling: bool = False,
        check_peers: Callable[[], None] | None = None,
        why_ended: Callable[[int], str] | None = None,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, which is numbered by its lowest. Connects the group."""

    @property
    def numa_nodes(self) -> list[list[int]]:
        """The ranks of each NUMA node; empty unless nodes are a level of sums (docs/hosts.md).

        Connects the group.
        """

    @property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on. Connects the group."""

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
        order: str = "rank",
        num_shards: int | None = None,
    ) -> None:
        """Reduces `tensor` over all ranks, in place, with the same bits on every rank.

        Contributions are rounded once to the wire dtype, summed in ascending rank (or as `order`
        says) in the accumulate dtype (float32 for 16- and 8-bit floats, otherwise the dtype itself;
        integers wrap), and the sum is rounded once to the wire dtype.

        Args:
            tensor: any shape; float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2,
                uint8, int8, int16, int32, int64 or bool.
            op: "sum", "product", "min", "max"; "avg" for floats and integers, whose wrapped sum is
                divided and truncated; "band", "bor", "bxor" for integers and bool.
            algorithm: "one_shot", "two_shot" and "ordered_ring" give the same bits as each other;
                "ring" sums each shard in another order, which depends on the number of elements and
                of ranks only; "auto" chooses by size from a measured table. "low_latency", for
                short CUDA tensors, gives the bits of "one_shot". "two_level" sums CPU tensors
                within `numa_nodes` first, and is refused where "two_shot" would give other bits
                (docs/hosts.md; not yet measured on a machine with several nodes).
            wire_dtype: the dtype of data between ranks; None means the tensor's dtype. Floating,
                and not wider than the tensor's.
            hop_dtype: the dtype of partial sums on their way around the "ring", CPU tensors only;
                None is the accumulate dtype.
            async_op: return a Work at once; leave the tensor alone until the work is done. For a
                CUDA tensor its wait() makes the current stream wait.
            group_size: a divisor of the world size. Each group of group_size consecutive ranks is
                summed first, then those sums are added, all in the accumulate dtype: the order and
                bits of a hierarchical all-reduce over hosts of that many ranks. Not supported by
                the rings. None, 1 and the world size give the plain ascending order.
            order: "rank" adds in ascending rank. "tree" adds in a balanced binary tree over
                num_shards logical shards, of which each rank holds an aligned block of 2**k. If it
                contributes their sum in the same tree (`rota.LogicalShards`), the result has the
                same bits for any number of ranks, where the wire dtype is the accumulate dtype. Not
                with the rings or group_size. Floats on CUDA: up to 16 ranks.
            num_shards: a power of two, at least the world size; the same on every rank, which is
                checked. None: the least that is possible.
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
        order: str = "rank",
        num_shards: int | None = None,
    ) -> dist.Work: ...
    def all_reduce_future(
        self, tensor: torch.Tensor, op: str, wire_dtype: torch.dtype | None
    ) -> torch.futures.Future[torch.Tensor]:
        """Like `all_reduce(async_op=True)`, but returns the future that a DDP hook must return."""

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
        group_size: int | None = None,
        order: str = "rank",
        num_shards: int | None = None,
    ) -> None:
        """Reduces a gradient bucket in place, in one pass each way, to the same bits on every rank.

        In float32: x = bucket * contribution_factor, plus residual / result_factor if there is a
        residual. x is encoded; the decoded contributions are summed in ascending rank and divided
        by divisor; the quotient is encoded and decoded once more, multiplied by result_factor, and
        rounded to the bucket's dtype.

        Encoding rounds to wire_dtype. With block scaling, each block of `block_elems(wire_dtype)`
        elements, counted from the bucket's first, is first divided by a power of two, which is sent
        as one byte (E8M0, as in the OCP Microscaling specification 1.0), so that nothing finite
        overflows (csrc/base/wire_format.h). Inf and NaN are preserved. csrc/README.md has the error
        bound.

        Args:
            bucket: any shape, strided; float32, float64, float16 or bfloat16; in and out.
            stats: contiguous float64 of 2 elements, on the bucket's device, as is residual; out:
                the number of non-finite elements of the result, and the sum of its squares, summed
                in float64.
            wire_dtype: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
            block_scaling: for float16 and float8 only.
            contribution_factor, divisor, result_factor: positive; they and their reciprocals lie in
                float32's normal range.
            residual: contiguous float32 of as many elements as bucket, in units of the result: the
                accumulated encoding error of this rank's contributions; in and out. 0 where x is
                not finite.
            stochastic_seed: None rounds to nearest even. An int in [0, 2**64), a new one for each
                call, rounds to one of the two neighbours at random, to the nearer one more often.
            algorithm: as in all_reduce; "ring" sums each shard in another order.
            group_size, order, num_shards: as in all_reduce.
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
        group_size: int | None = None,
        order: str = "rank",
        num_shards: int | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Like `reduce_bucket`, on a progress thread; returns the future of the bucket.

        `bucket`, `stats` and `residual` must not be touched before the future is done.
        """

    def reduce_shards_future(
        self,
        shards: ShardedBucket,
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
        order: str = "rank",
        num_shards: int | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Half of reduce_bucket_future: writes float32 quotients to `shards.sums`, and leaves the
        bucket as it is.

        Args:
            stats: int64 of SHARD_STATS elements, output: the number of non-finite sums of this
                rank, and the words of the exact sum of the squares of the others, the lowest first,
                in units of 2**SQUARES_UNIT_EXPONENT.
            result_factor: in whose units the residual is kept.
        """

    def update_shards(self, shards: ShardedBucket, steps: Sequence[UpdateStep | None]) -> None:
        """The other half: updates the parameters of this rank's pieces and sends them to all ranks.

        Args:
            steps: by piece of the bucket; None: its elements travel as they are.

        Raises:
            TypeError, ValueError: a piece of this rank has no state for its step.
            rota.Mismatch, rota.PeerFailed, rota.Timeout: as all_reduce. Once it has begun, parts of
                the bucket may have been updated.
        """

    # Calls that do not reduce take every dtype that torch stores, except quantized ones. On CUDA
    # tensors gather, scatter and all_to_all are made of transfers between pairs of ranks, and
    # reduce sums on all of them.

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copies rank `root`'s `tensor` to all ranks; same number of elements and dtype on all."""

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        group_size: int | None = None,
        order: str = "rank",
        num_shards: int | None = None,
    ) -> None:
        """Reduces `tensor` over all ranks into rank `root`'s, with the bits of all_reduce.

        The other ranks' tensors stay as they are. op, group_size, order, num_shards: as in
        all_reduce.
        """

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenates every rank's `input` into `output`, in ascending rank.

        Args:
            output: world_size times as many elements as input, of its dtype.
            input: same number of elements and dtype on every rank; may be this rank's part of
                output.
        """

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int = 0) -> None:
        """Concatenates every rank's `input` into rank `root`'s `output`, in ascending rank.

        Args:
            output: on root as in all_gather, None on the other ranks.
            input: as in all_gather.
        """

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int = 0) -> None:
        """Rank i's `output` becomes part i of world_size equal parts of rank `root`'s `input`.

        Args:
            output: same number of elements and dtype on every rank.
            input: on root world_size times as many elements, None on the other ranks.
        """

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: str = "sum",
        group_size: int | None = None,
        order: str = "rank",
        num_shards: int | None = None,
    ) -> None:
        """Reduces every rank's `input`; rank i gets part i of the result, with all_reduce's bits.

        Args:
            output: may be this rank's part of input.
            input: world_size times as many elements as output, of its dtype.
            op, group_size, order, num_shards: as in all_reduce.
        """

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> None:
        """Sends part i of `input` to rank i, and receives part i of `output` from it.

        Args:
            output: of input's dtype; may be the same tensor, which is then copied first.
            input: the parts for all ranks, one after the other.
            output_splits: elements received from each rank; empty: equal parts.
            input_splits: elements sent to each rank; empty: equal parts.

        Raises:
            rota.Mismatch: on every rank, if one rank expects a part of another length than is sent.
        """

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> None:
        """Sends `tensor` to rank `peer`, which calls recv() or irecv() with the same tag.

        Messages of the same sender and tag are received in the order in which they were sent. With
        a CPU tensor the call blocks until the tensor may be changed again: a short message then
        waits in shared memory for its recv; a long one needs a receiver that is waiting in any rota
        call, even for another message. So both ranks of a pair may send first, whatever the length.

        A receiver that waits in a rota call, or has an irecv() outstanding, takes in every message
        and keeps those that nobody has asked for yet, without a limit. A sender that is always
        ahead can therefore fill the receiver's memory: call irecv() early, or let the receiver
        answer every few messages. A receiver that computes takes nothing in; its senders wait.

        A message to the own rank is copied, and does not block.

        With a CUDA tensor the call is queued on the current stream. Tags are ignored, and the GPUs
        must be joined, by connect_device() or any collective, in which all ranks take part.

        Args:
            tensor: any shape and dtype; strided ones are packed.
            peer: a rank; another than this one for CUDA tensors.
            tag: 0 or more.

        Raises:
            rota.TransportError: the peer has no memory to keep a message that it has not asked for.
        """

    def recv(self, tensor: torch.Tensor, peer: int | None = None, tag: int = 0) -> int:
        """Receives into `tensor` the next message with this tag from rank `peer`, and blocks.

        Args:
            tensor: same dtype and number of elements as the sent one; strided ones are unpacked.
            peer: None receives a message from any rank (CPU tensors only).
            tag: as in send().

        Returns:
            The sender's rank.

        Raises:
            rota.Mismatch: the message has another dtype or number of elements; names both sides.
                The message is dropped, nothing is written, and the group stays usable.
        """

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> torch.distributed.Work:
        """send() that returns at once; `tensor` must not be changed before the work is done.

        It makes progress in the background, and sooner while a thread waits in any rota call.
        """

    def irecv(
        self, tensor: torch.Tensor, peer: int | None = None, tag: int = 0
    ) -> torch.distributed.Work:
        """recv() that returns at once; `tensor` must not be used before the work is done."""

    def connect_device(self, device: torch.device) -> None:
        """Joins the GPUs of all ranks; `device` is this rank's GPU. Collective; blocks.

        The first collective on CUDA tensors does it too, except in a graph capture.

        Raises:
            ValueError: the communicator has another device, or a graph is being captured.
            rota.TransportError: the GPUs cannot reach each other; says why.
        """

    @property
    def peer_access(self) -> str | None:
        """How the GPUs reach each other, such as "CUDA IPC"; None before they are joined."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    @property
    def has_failed(self) -> bool:
        """Whether every later call raises, because a call has failed or a rank has called abort."""

    def check_results(self) -> None:
        """Waits for what is queued on the GPU, and raises if any of it has failed.

        Collectives on a GPU fail after the call has returned. Floats that they could not compute
        are NaN then; integers are as they were. Call it before results are kept: before
        optimizer.step() and before a checkpoint. Does nothing before GPUs are joined.
        """

    def abort(self, reason: str) -> None:
        """Makes every waiting and every later call fail, on every rank, with this text."""

    def close(self) -> None:
        """Waits for queued work, then leaves the group. Later calls raise; idempotent.

        Once GPUs are joined, it also waits for the other ranks' kernels to end, so that none of
        them writes to memory that this rank has freed: up to 2 s for ranks that do not close.

        Raises:
            rota.Timeout, rota.PeerFailed: queued work did not end; names the rank that it needs.
        """

def map_device_windows(
    own: ExposedTensor,
    others: Sequence[OpenedTensor | None],
    rank: int,
    store: dist.Store,
    device: torch.device,
    num_bytes: int,
    all_gather: Callable[[bytes], Sequence[bytes]],
) -> list[torch.Tensor]:
    """Memory on each rank's GPU that all ranks map; not in a build for the CPU.

    Collective, with the same num_bytes, 1 or more, on all ranks. Blocks. Returns uint8 tensors of
    zeroes, by rank; `own`, the rank's window on the CPU, keeps its memory until no rank maps it.
    all_gather() gives every rank the texts of all. Raises rota.TransportError on every rank.
    """

class LocalGroup:
    """See LocalGroup; not in a build for the CPU."""

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
        order: str = "rank",
    ) -> None:
        """Reduces over all ranks, in place; otherwise, and in its bits, as Communicator.all_reduce.

        Args:
            tensors: one per rank.
            algorithm: "low_latency", "one_shot", "two_shot", "two_shot_in_place", "ordered_ring",
                "ring", "hierarchical", or "auto": chosen by the group's tuning, by default
                "two_shot_in_place" at every size, which never waits and moves the fewest bytes.
        """

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: str = "sum",
        group_size: int | None = None,
        order: str = "rank",
    ) -> None:
        """Reduces the inputs as all_reduce; outputs[i] becomes part i of world_size equal ones."""

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Concatenates all inputs into each output."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Copies tensors[root] into all others."""

    def send_recv(self, src: int, dst: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors[src] into tensors[dst]; the other ranks' stay as they are."""

class GradientBucket:
    """See GradientBucket; not in a build for the CPU."""

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
            residual, stochastic_seed: as in reduce_bucket; residual has num_elems elements, laid
                out like the wire.
        """

    def unpack(self, *, result_factor: float = 1.0) -> None:
        """Writes the wire buffer times result_factor to the gradients, and updates stats."""

    @property
    def wire(self) -> torch.Tensor:
        """uint8 of num_wire_bytes: each gradient starts at a multiple of 512 elements."""
    @property
    def stats(self) -> torch.Tensor:
        """The last unpack's float64 of 2 elements, as in reduce_bucket."""
    @property
    def num_elems(self) -> int:
        """Elements of the wire, including the padding of tiles."""
    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
    @property
    def num_wire_bytes(self) -> int: ...

class BackendOptions(dist._Backend.Options):
    """See rota.BackendOptions."""

    connects_at_first_use: bool
    """Whether the group connects at its first call, as subgroups do, or when it is made."""
    choose_engine: ChooseEngine  # called if ranks are on several hosts
    check_peers: Callable[[], None] | None
    """Called several times a second while ranks connect; raises if one of them is gone."""
    why_ended: Callable[[int], str] | None
    """Says how a rank has ended, if that is known; called for those that have not come yet."""
    watch_block: Callable[[Callable[[], None]], None] | None
    """Called when a coalescing block begins; calls its argument once torch's manager is gone."""

    def __init__(
        self,
        timeout: timedelta,
        slot_bytes: int,
        wire_dtype: torch.dtype | None,
        order: str,
        num_shards: int | None,
        inter_wire_dtype: torch.dtype | None,
        inter_block_scaling: bool,
    ) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def wire_dtype(self) -> torch.dtype | None: ...

class ProcessGroupRota(dist._Backend):
    """The torch.distributed backend "rota"; init_process_group makes it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        options: BackendOptions,
        make_delegate: Callable[[str, dist.Store, int, int], dist._Backend],
        make_window: Callable[[torch.Tensor, dist.Store, int, int], Window],
        handle: Callable[[], str] | None = None,
        reconfigure: Callable[
            [
                int,
                Sequence[str],
                bool,
                timedelta | None,
                Callable[[dist.Store, int, int, Callable[[], None]], None],
            ],
            None,
        ]
        | None = None,
    ) -> None: ...
    @property
    def options(self) -> BackendOptions: ...
    def check_results(self) -> None:
        """As Communicator.check_results."""

    def abort(self, reason: str = ...) -> None:
        """As Communicator.abort."""
    def spans_hosts(self, ranks: list[int]) -> bool:
        """Whether these ranks are known to be on several hosts; False before the group connects."""
    def why_ended(self, rank: int) -> str:
        """How a rank has ended, in a sentence, if it is known to have; otherwise empty."""

    def all_gather_in(
        self,
        wire_dtype: torch.dtype,
        block_scaling: bool,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
    ) -> dist.Work:
        """Concatenates the inputs of all ranks, each rounded once to the wire dtype, also where it
        comes from. Blocks count from the start of each part. `input` may be this rank's part of
        output."""

    def reduce_scatter_in(
        self,
        wire_dtype: torch.dtype,
        output: torch.Tensor,
        input: torch.Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool,
    ) -> dist.Work:
        """Reduces the inputs and leaves part `rank` of world_size equal ones in `output`, with the
        bits of Communicator.all_reduce in the same wire_dtype."""
