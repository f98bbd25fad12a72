"""The exceptions as callers catch them."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

import rota

KINDS = [rota.PeerFailed, rota.Timeout, rota.Mismatch, rota.TransportError]


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_a_rota_error_and_a_torch_backend_error(kind: type[Exception]) -> None:
    assert issubclass(kind, rota.RotaError)
    assert issubclass(kind, dist.DistBackendError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", [rota.RotaError, *KINDS])
def test_error_survives_pickling(kind: type[Exception]) -> None:
    """Launchers send the exception of a worker to their parent."""
    copy = pickle.loads(pickle.dumps(kind("rank 1 has died")))
    assert type(copy) is kind
    assert str(copy) == "rank 1 has died"
