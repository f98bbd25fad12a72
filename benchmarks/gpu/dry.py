"""What stands in for a GPU in a dry run: torch on the CPU, with the interfaces of rota's entries.

It lets every line of the benchmarks run, their checks too. Nothing here is rota, and no time taken
here means anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from error_bound import Wire, block_scales, rota_wire
from gpu.clock import Clock, HostClock
from gpu.target import Body

# What a GPU is likely to have, scaled down as the sizes of a dry run are.
L2_BYTES = 16 << 10
MAX_LOW_LATENCY_BYTES = 48 << 10


class HostTarget:
    """The CPU in the place of a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.clock: Clock = HostClock()
        self.is_dry = True
        self.runs_torch_kernels = True
        self.l2_bytes = L2_BYTES

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def capture(self, body: Body) -> Body:
        """The calls themselves; runs them once, as a capture does."""
        body()
        return body

    def num_launches(self, body: Body) -> int | None:
        """None: there are no kernels."""
        body()
        return None

    def local_group(self, world_size: int, timeout_s: float = 10.0) -> HostGroup:
        """In the place of rota.LocalGroup."""
        return HostGroup(world_size)

    def gradient_bucket(
        self, gradients: Sequence[Tensor], wire_dtype: torch.dtype, block_scaling: bool | None
    ) -> HostBucket:
        """In the place of rota.GradientBucket."""
        is_scaled = wire_dtype.itemsize < 4 if block_scaling is None else block_scaling
        return HostBucket(gradients, rota_wire(wire_dtype, is_scaled))


class HostGroup:
    """In the place of rota.LocalGroup."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: str = "sum",
        algorithm: str = "auto",
        group_size: int | None = None,
    ) -> None:
        """Sums in the tensors' own dtype."""
        num_bytes = tensors[0].numel() * tensors[0].element_size()
        if algorithm == "low_latency" and num_bytes > MAX_LOW_LATENCY_BYTES:
            raise ValueError(f"low_latency takes up to {MAX_LOW_LATENCY_BYTES} bytes")
        total = self._sum(tensors, op)
        for tensor in tensors:
            tensor.copy_(total)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str = "sum"
    ) -> None:
        """A piece of the sum to each rank."""
        for output, piece in zip(
            outputs, self._sum(inputs, op).chunk(self.world_size), strict=True
        ):
            output.copy_(piece)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Every input to each rank."""
        for output in outputs:
            output.copy_(torch.cat(list(inputs)))

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """The root's to each rank."""
        for tensor in tensors:
            tensor.copy_(tensors[root])

    def send_recv(self, src: int, dst: int, tensors: Sequence[Tensor]) -> None:
        """From one rank's tensor to one other's."""
        tensors[dst].copy_(tensors[src])

    def _sum(self, tensors: Sequence[Tensor], op: str) -> Tensor:
        total = torch.stack([tensor.double() for tensor in tensors]).sum(dim=0)
        return (total / self.world_size if op == "avg" else total).to(tensors[0].dtype)


class HostBucket:
    """In the place of rota.GradientBucket: every gradient behind the other, then their scales."""

    def __init__(self, gradients: Sequence[Tensor], wire: Wire) -> None:
        self._gradients = list(gradients)
        self._wire = wire
        self._scales: list[Tensor] = []
        self.num_bytes = sum(g.numel() * g.element_size() for g in gradients)
        self._num_elems = sum(g.numel() for g in gradients)
        num_scales = -(-self._num_elems // wire.block_elems) if wire.block_elems else 0
        self.num_wire_bytes = self._num_elems * wire.dtype.itemsize + num_scales
        self.wire = torch.zeros(self.num_wire_bytes, dtype=torch.uint8)
        self.stats = torch.zeros(2, dtype=torch.float64)

    def pack(self, *, contribution_factor: float = 1.0) -> None:
        """Encodes, tensor by tensor."""
        self._scales = []
        for gradient, encoded in zip(self._gradients, self._encoded(), strict=True):
            contribution = gradient.flatten().double() * contribution_factor
            scales = block_scales(contribution.abs(), self._wire)
            self._scales.append(scales)
            encoded.copy_((contribution / scales).to(self._wire.dtype))

    def unpack(self, *, result_factor: float = 1.0) -> None:
        """Decodes, and counts."""
        self.stats.zero_()
        for gradient, encoded, scales in zip(
            self._gradients, self._encoded(), self._scales, strict=True
        ):
            result = (encoded.double() * scales * result_factor).to(gradient.dtype)
            gradient.copy_(result.view_as(gradient))
            self.stats[0] += (~result.isfinite()).sum()
            self.stats[1] += result.double().square().sum()

    def _encoded(self) -> list[Tensor]:
        payload = self.wire[: self._num_elems * self._wire.dtype.itemsize].view(self._wire.dtype)
        return list(payload.split([gradient.numel() for gradient in self._gradients]))
