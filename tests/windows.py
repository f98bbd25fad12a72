"""Ranks of one host or several that have windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import rota
from ranks import Rank, Ranks, error_of
from several_hosts import Layout

PAIR = Layout((0, 0))
FOUR = Layout((0, 0, 0, 0))


def _without_layout(rank: Rank, layout: Layout, function: Callable[..., Any], *args: object) -> Any:
    return function(rank, *args)


def start_on(
    layout: Layout, function: Callable[..., Any], *, env: Mapping[str, str] | None = None
) -> Ranks:
    """Starts `function(rank)` on the ranks of a layout."""
    return layout.start(_without_layout, function, env=env)


def run_on(layout: Layout, function: Callable[..., Any], *args: object) -> list[Any]:
    """Runs `function(rank, *args)` on the ranks of a layout."""
    return layout.run(_without_layout, function, *args)


def hosts_of(*layouts: Layout) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", layouts, ids=str)


def is_local(window: rota.Window, rank: int) -> bool:
    """Whether a rank's memory can be mapped."""
    return error_of(lambda: window.view(rank))[0] == "nothing"
