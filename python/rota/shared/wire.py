"""The format in which float32 numbers lie in shared memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rota import _C


class Wire(NamedTuple):
    """A format of the extension; dtype None: numbers stay as they are."""

    dtype: torch.dtype | None = None
    block_scaling: bool = False

    def num_bytes(self, num_elems: int, own_dtype: torch.dtype = torch.float32) -> int:
        if self.dtype is None:
            return own_dtype.itemsize * num_elems
        return _C.encoded_bytes(num_elems, self.dtype, self.block_scaling)

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether it stores tensors of this dtype in fewer bytes."""
        if self.dtype is None or not dtype.is_floating_point:
            return False
        return self.dtype.itemsize < dtype.itemsize

    def encode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        assert self.dtype is not None
        _C.encode(encoded, values, self.dtype, self.block_scaling)

    def decode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        assert self.dtype is not None
        _C.decode(values, encoded, self.dtype, self.block_scaling)
