"""Tensors as stored bytes: checksums, wire formats, and exposed tensors with their words."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import rota
from rota import _C

SOON = timedelta(seconds=20)


def test_copy_with_checksum_copies_and_sums() -> None:
    source = torch.arange(1001, dtype=torch.int32)
    target = torch.zeros_like(source)
    assert _C.copy_with_checksum(target, source) == _C.checksum(source) == _C.checksum(target)
    assert torch.equal(target, source)
    target[500] += 1
    assert _C.checksum(target) != _C.checksum(source)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.copy_with_checksum(torch.zeros(3), torch.zeros(4)),
        lambda: _C.checksum(torch.zeros(4, 4).t()[:2]),
        lambda: _C.encode(torch.zeros(7, dtype=torch.uint8), torch.zeros(4), torch.float16, False),
        lambda: _C.decode(
            torch.zeros(4).double(), torch.zeros(8, dtype=torch.uint8), torch.float16, False
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        call()


def test_exposed_tensor_is_opened_by_its_address() -> None:
    tensor = rota.empty(5)
    exposed = _C.ExposedTensor(tensor, 2, others_may_write=False)
    opened = _C.OpenedTensor(exposed.address, "its owner", SOON)
    tensor.fill_(3)
    exposed.publish(1, 7)
    assert opened.wait(1, 7, SOON) and opened.load(1) == exposed.load(1) == 7
    assert not opened.wait(1, 8, timedelta(milliseconds=1))
    assert opened.bytes.view(torch.float32).eq(3).all()
    with pytest.raises(ValueError, match="the word is 2"):
        opened.load(2)
    exposed.close()
    assert not opened.is_open
    with pytest.raises(rota.PeerFailed, match="its owner"):
        opened.wait(1, 8, SOON)
    with pytest.raises(rota.TransportError, match="its owner"):
        _C.OpenedTensor(exposed.address, "its owner", SOON)
