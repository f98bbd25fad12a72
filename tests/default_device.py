"""A default device for tensors that rota makes, or has torch make, and not for those of tests.

ROTA_TEST_DEFAULT_DEVICE=xpu runs the ranks of any test with one that no build for the CPU or CUDA
has, as a program would after torch.set_default_device().
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import rota

_ROTA, _TORCH = (str(Path(str(package.__file__)).parent) for package in (rota, torch))


class _DefaultDevice(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and _comes_from_rota():
            kwargs["device"] = self._device
        return func(*args, **kwargs)


def _comes_from_rota() -> bool:
    """Whether rota's code is the first on the stack that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_ROTA)


def enter_default_device() -> None:
    """Sets this thread's until the end of the process."""
    if device := os.environ.get("ROTA_TEST_DEFAULT_DEVICE"):
        _DefaultDevice(device).__enter__()
