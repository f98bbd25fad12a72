"""rota._C.GpuTuning and its table (csrc/schedule/tuning.h), which need no GPU.

The choice of the closest row is tested with made-up rows in tests/cpp/tuning_cases.cpp.
"""

from __future__ import annotations

import pytest

from rota import _C

TOPOLOGIES = ("local", "nvlink", "pcie")
FIELDS = (
    "max_low_latency_bytes",
    "max_one_shot_bytes",
    "num_channels",
    "slot_bytes",
    "free_chunk_bytes",
    "free_threads",
)


def fields_of(tuning: _C.GpuTuning) -> dict[str, int]:
    return {field: getattr(tuning, field) for field in FIELDS}


@pytest.mark.parametrize("world_size", (1, 2, 16, 64), ids="ws{}".format)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gpu_tuning_any_gpu_has_a_row_that_says_where_it_comes_from(
    topology: str, world_size: int
) -> None:
    for gpu in ("", "a GPU that nobody has seen", "NVIDIA H200"):
        tuning = _C.gpu_tuning(gpu, topology, world_size)
        assert tuning.provenance
        assert tuning.slot_bytes % 128 == tuning.free_chunk_bytes % 128 == 0
        assert tuning.free_threads % 32 == 0


def test_gpu_tuning_local_ranks_never_wait() -> None:
    """Local ranks use two_shot_in_place at every size."""
    tuning = _C.gpu_tuning("", "local", 2)
    assert tuning.max_low_latency_bytes == tuning.max_one_shot_bytes == 0


@pytest.mark.parametrize("field", FIELDS)
def test_gpu_tuning_changed_copy_leaves_table_and_original(field: str) -> None:
    original = _C.gpu_tuning("", "nvlink", 8)
    before = fields_of(original)
    copy = _C.GpuTuning(original)
    setattr(copy, field, before[field] + 1)
    assert fields_of(copy) == before | {field: before[field] + 1}
    assert copy.provenance == original.provenance
    assert fields_of(original) == before
    assert fields_of(_C.gpu_tuning("", "nvlink", 8)) == before


def test_gpu_tuning_provenance_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        _C.gpu_tuning("", "nvlink", 8).provenance = "measured"


def test_gpu_tuning_unknown_topology_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"topology is 'infiniband', .* local, nvlink, pcie"):
        _C.gpu_tuning("", "infiniband", 8)


@pytest.mark.parametrize("world_size", (-1, 0, 65))
def test_gpu_tuning_refuses_numbers_of_ranks(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}, expected 1 to 64"):
        _C.gpu_tuning("", "nvlink", world_size)
