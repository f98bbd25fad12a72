"""One word has one meaning: arguments of one name have one default, wherever they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from rota import options

# Made for float16, which their first lines say; and a group of its own, without a process group.
EXCEPTIONS = {
    ("HookState", "wire_dtype"): torch.float16,
    ("GradientBucket", "wire_dtype"): torch.float16,
    ("LocalGroup", "timeout"): timedelta(seconds=10),
}
WORDS = ("wire_dtype", "block_scaling", "timeout")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("rota", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Classes and functions that users see, with the names that they have there."""
    for name in rota.__all__:
        value = getattr(rota, name)
        members = vars(value) if inspect.ismodule(value) else {name: value}
        for member in getattr(value, "__all__", members):
            call = members[member]
            is_own = str(getattr(call, "__module__", "")).startswith("rota")
            if is_own and callable(call) and not member.startswith("_"):
                yield member, call.__init__ if inspect.isclass(call) else call


def test_arguments_of_one_name_have_one_default() -> None:
    found = {}
    for name, call in public_calls():
        for argument in inspect.signature(call).parameters.values():
            if argument.name.endswith(WORDS) and argument.default is not inspect.Parameter.empty:
                found[name, argument.name] = argument.default
    different = {place: default for place, default in found.items() if default is not None}
    assert len(found) > 20 and different == EXCEPTIONS


@pytest.mark.parametrize("call", [rota.HookState, rota.fused_hook, rota.gpu.GradientBucket])
def test_what_is_made_for_float16_says_so_first(call: Callable[..., Any]) -> None:
    assert "float16" in (call.__doc__ or "").split(".\n")[0].partition("Args:")[0]


def test_blocks_are_scaled_by_default_where_the_wire_is_narrow() -> None:
    narrow = {torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
    wide = {None, torch.float32, torch.bfloat16}
    assert {dtype for dtype in narrow | wide if options.scales_blocks(dtype)} == narrow
    assert options.scales_blocks(torch.bfloat16, True) and not options.scales_blocks(
        torch.float16, False
    )


@pytest.mark.usefixtures("one_rank")
def test_window_accumulates_in_scaled_blocks_by_default() -> None:
    small = torch.full((64,), 2.0**-30)
    for block_scaling, expected in ((None, small), (True, small), (False, torch.zeros(64))):
        window = rota.Window(64, dtype=torch.float32)
        window.accumulate(small, 0, wire_dtype=torch.float16, block_scaling=block_scaling)
        assert torch.equal(window.tensor, expected)
