"""The closed formulas of csrc/schedule/cost.h, as csrc/README.md and Python show them."""

from __future__ import annotations

from typing import Any

import pytest

from programs import ROOT, run_python
from rota._C import schedule


def test_readme_table_is_what_the_script_prints() -> None:
    done = run_python("benchmarks/paper.py", "--ranks", "8", "--dtype", "float16")
    assert done.stdout in (ROOT / "csrc" / "README.md").read_text(), (
        "stale; it is now\n" + done.stdout
    )


def test_cost_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"what is 'tree', expected one of one_shot, .*, send_recv"
    ):
        schedule.cost("tree", tensor=1, wire=1, hop=1, world_size=2)


@pytest.mark.parametrize(
    "ranks",
    [{"world_size": 1}, {"world_size": 8, "group_size": 0}, {"world_size": 8, "group_size": 3}],
)
def test_cost_refuses_groups_that_do_not_divide_the_ranks(ranks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"world_size is {ranks['world_size']} and group_size"):
        schedule.cost("hierarchical", tensor=1, wire=1, hop=1, **ranks)
