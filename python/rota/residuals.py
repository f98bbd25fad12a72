"""Error feedback (Seide et al. 2014): adds a gradient's encoding error to the next gradient.

DDP rebuilds its buckets after the first step, in the order in which gradients came, and again in a
new process. So each bucket's residual is split into pieces that belong to parameters, and a rebuilt
bucket's residual is assembled from its parameters' pieces, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rota.layout import num_reals, shaped
from rota.sharding import local_of


class Residuals:
    """One float32 residual for each element of each gradient, in units of the gradient."""

    def __init__(self) -> None:
        # Each piece is a view into its bucket's residual, in the order of the parameter's memory.
        self._pieces = WeakTensorKeyDictionary()
        self._loaded: dict[str, torch.Tensor] = {}

    def of_bucket(
        self, parameters: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]
    ) -> torch.Tensor:
        """The residual of a bucket of these parameters: flat, float32, laid out like the bucket.

        Raises:
            ValueError: a loaded residual does not fit its parameter.
        """
        flat = torch.cat([self._piece(parameter, name_of) for parameter in parameters])
        start = 0
        for parameter in parameters:
            length = num_reals(parameter)
            self._pieces[parameter] = flat[start : start + length]
            start += length
        return flat

    def _piece(
        self, parameter: torch.Tensor, name_of: Callable[[torch.Tensor], str]
    ) -> torch.Tensor:
        piece: torch.Tensor | None = self._pieces.get(parameter)
        if piece is not None and piece.numel() == num_reals(parameter):  # else it changed shape
            return piece
        piece = torch.zeros(num_reals(parameter), dtype=torch.float32, device=parameter.device)
        if self._loaded:
            name = name_of(parameter)
            residual = self._loaded.pop(name)
            shape = local_of(parameter).shape
            if residual.shape != shape:
                raise ValueError(
                    f"rota.HookState: the residual of {name!r} that was loaded has shape "
                    f"{list(residual.shape)}, the parameter has {list(shape)}; load the "
                    f"state of the same model"
                )
            shaped(piece, parameter).copy_(residual)
        return piece

    def by_name(self, name_of: Callable[[torch.Tensor], str]) -> dict[str, torch.Tensor]:
        """Copies with the parameters' shapes, including loaded ones that no bucket has used yet."""
        copies = {name: residual.clone() for name, residual in self._loaded.items()}
        for parameter, piece in self._pieces.items():
            copies[name_of(parameter)] = shaped(piece, parameter).clone()
        return copies

    def load(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals; parameters take theirs when their buckets come."""
        self._pieces = WeakTensorKeyDictionary()
        self._loaded = {name: residual.clone() for name, residual in residuals.items()}

    @property
    def loaded_names(self) -> set[str]:
        """The names of loaded residuals that no bucket has used yet."""
        return set(self._loaded)
