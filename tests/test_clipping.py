"""rota.clip_grad_norm_ compared with torch.nn.utils.clip_grad_norm_, after rota.fused_hook."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import rota
from models import ExactGradients, batch_of, exact_batch, fused_ddp, make_model, norm_of
from ranks import Rank, check_error, error_of, on_ranks

# In float32 the order in which squares are summed changes norms, coefficients and gradients.
REL = 2e-6


def make_ddp(
    model: torch.nn.Module | None = None, **options: Any
) -> tuple[DistributedDataParallel, rota.HookState]:
    state = rota.HookState()
    return fused_ddp(model or ExactGradients(), state, **options), state


def gradients(parameters: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in parameters if p.grad is not None]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=REL, atol=0.0)


@contextlib.contextmanager
def num_warnings(expected: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == expected, texts
    assert all(text.startswith("rota.clip_grad_norm_: ") for text in texts)


@contextlib.contextmanager
def torch_must_not_look() -> Iterator[None]:
    """Computing a norm with torch fails in this context."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("clip_grad_norm_", "get_total_norm"):
            patch.setattr(torch.nn.utils, name, None)
        patch.setattr(torch, "_foreach_norm", None)
        yield


# ---- with the fused norm


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@on_ranks(2)
def test_clip_uses_the_fused_norm(rank: Rank, max_norm: float, as_view: bool) -> None:
    rank.init("gloo")
    ddp, state = make_ddp(gradient_as_bucket_view=as_view)
    for step in range(3):
        ddp.zero_grad()
        ddp(exact_batch(rank.rank, step)).backward()
        before = gradients(ddp.parameters())
        versions = [p.grad._version for p in ddp.parameters()]
        expected_norm = norm_of(ddp)
        with torch_must_not_look(), num_warnings(0):
            norm = rota.clip_grad_norm_(ddp.parameters(), max_norm)
        assert norm.dtype == torch.float32 and norm.shape == ()
        assert norm.item() == expected_norm.item()  # the squares are integers
        coefficient = max_norm / (expected_norm + 1e-6)
        if coefficient >= 1:
            assert [p.grad._version for p in ddp.parameters()] == versions, "were not touched"
            coefficient = torch.ones(())
        for gradient, unclipped in zip(gradients(ddp.parameters()), before, strict=True):
            assert torch.equal(gradient, unclipped * coefficient)
        clipped_norm = norm_of(ddp).item()
        assert state.grad_norm().item() == pytest.approx(clipped_norm, rel=REL)
        with torch_must_not_look(), num_warnings(0):
            again = rota.clip_grad_norm_(ddp.parameters(), max_norm)
        assert again.item() == pytest.approx(clipped_norm, rel=REL)
        assert norm.item() > 1


@on_ranks(2)
def test_clip_of_several_models_together(rank: Rank) -> None:
    rank.init("gloo")
    ddps = [make_ddp()[0] for _ in range(3)]
    sum(ddp(exact_batch(rank.rank, i)) for i, ddp in enumerate(ddps)).backward()
    parameters = [p for ddp in ddps[:2] for p in ddp.parameters()]
    expected = torch.stack([norm_of(ddp) for ddp in ddps[:2]]).double().square().sum().sqrt()
    with torch_must_not_look(), num_warnings(0):
        norm = rota.clip_grad_norm_(parameters, 1.0)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-7)  # both norms were rounded
    for i, wanted in enumerate((None, None, norm_of(ddps[2]))):
        actual = norm_of(ddps[i])
        if wanted is None:
            assert 0 < actual < 1
        else:
            assert actual.item() == wanted.item()


@on_ranks(2)
def test_clip_with_unused_parameters(rank: Rank) -> None:
    rank.init("gloo")
    ddp, _ = make_ddp(find_unused_parameters=True)
    for step, used in enumerate(([0, 1], [1, 4], [rank.rank])):
        ddp.zero_grad()
        ddp(exact_batch(rank.rank, step), used).backward()
        with torch_must_not_look(), num_warnings(0):
            norm = rota.clip_grad_norm_(ddp.parameters(), 1e6)
        assert norm.item() == norm_of(ddp).item()


@on_ranks(2)
def test_clip_takes_the_norm_of_the_state_that_reduced_last(rank: Rank) -> None:
    rank.init("gloo")
    model = torch.nn.Linear(10, 1, bias=False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    buckets = []

    def keep(state, bucket):  # DDP refuses text
        buckets.append(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, keep)
    ddp(torch.ones(10)).backward()
    # Either may come first where clip_grad_norm_ looks for the state that has the norm.
    states = [rota.HookState(loss_scale=1.0), rota.HookState(loss_scale=0.5)]
    for state in states * 3:
        rota.fused_hook(state, buckets[0]).wait()
        expected = norm_of(model)
        with torch_must_not_look(), num_warnings(0):
            assert rota.clip_grad_norm_(model.parameters(), 1e9).item() == expected.item()


@on_ranks(2)
def test_clip_leaves_a_norm_with_stale_gradients_to_torch(rank: Rank) -> None:
    """DDP reduces gradients that the last pass did not use, so the hook's norm includes them."""
    rank.init("gloo")
    ddp, _ = make_ddp(find_unused_parameters=True)
    parameters = list(ddp.parameters())
    ddp(exact_batch(rank.rank, 0)).backward()
    ddp(exact_batch(rank.rank, 1), [0, 1]).backward()
    assert all(p.grad is not None for p in parameters)
    expected = torch.cat([p.grad for p in parameters[:2]]).norm()
    with num_warnings(1):
        norm = rota.clip_grad_norm_(parameters[:2], 1e6)
    assert norm.item() == pytest.approx(expected.item(), rel=REL)


@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=["inf", "nan"])
@on_ranks(2)
def test_clip_of_a_norm_that_is_not_finite_does_as_torch(rank: Rank, value: float) -> None:
    rank.init("gloo")
    ddp, _ = make_ddp()
    batch = exact_batch(rank.rank, 0)
    if rank.rank == 1:
        batch[1000] = value
    ddp(batch).backward()
    parameters = list(ddp.parameters())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for p, copy in zip(parameters, copies, strict=True):
        copy.grad = p.grad.clone()
    error = error_of(rota.clip_grad_norm_, parameters, 1.0, error_if_nonfinite=True)
    check_error(error, "RuntimeError", "not finite")
    for p, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(p.grad, copy.grad, rtol=0, atol=0, equal_nan=True)
    with torch_must_not_look(), num_warnings(0):
        norm = rota.clip_grad_norm_(parameters, 1.0)
    expected_norm = torch.nn.utils.clip_grad_norm_(copies, 1.0)
    torch.testing.assert_close(norm, expected_norm, rtol=0, atol=0, equal_nan=True)
    for p, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(p.grad, copy.grad, rtol=0, atol=0, equal_nan=True)


# ---- cases that fall back to torch, with one warning


def change_in_place(ddp: DistributedDataParallel) -> None:
    next(ddp.parameters()).grad.add_(1.0)


def replace(ddp: DistributedDataParallel) -> None:
    parameter = next(ddp.parameters())
    version = parameter.grad._version
    parameter.grad = parameter.grad + 1.0
    while parameter.grad._version < version:  # the version number alone must not reveal the change
        parameter.grad.add_(0.0)


def remove_and_add(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(exact_batch(0, 7)).backward()


def add_without_sync(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        ddp(exact_batch(0, 7)).backward()


def unscale_by_torch(ddp: DistributedDataParallel) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(ddp.parameters(), 1.0))


def drop_one(ddp: DistributedDataParallel) -> None:
    next(ddp.parameters()).grad = None


class Case(NamedTuple):
    change: Callable[[DistributedDataParallel], object] = lambda ddp: None
    parameters: Callable[[DistributedDataParallel], Any] = lambda ddp: list(ddp.parameters())
    norm_type: float = 2.0
    num_warnings: int = 1


def some(ddp: DistributedDataParallel) -> Any:
    return list(ddp.parameters())[1:]


def and_others(ddp: DistributedDataParallel) -> Any:
    other = torch.nn.Parameter(torch.zeros(3))
    other.grad = torch.tensor([100.0, 0.0, 0.0])
    return [*ddp.parameters(), other]


CASES = {
    "changed": Case(change_in_place),
    "replaced": Case(replace),
    "removed": Case(remove_and_add),
    "added": Case(add_without_sync),
    "clipped-by-torch": Case(lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)),
    "unscaled-by-torch": Case(unscale_by_torch),
    "dropped": Case(drop_one, some),
    "some": Case(parameters=some),
    "one": Case(parameters=lambda ddp: list(ddp.parameters())[4]),
    "more": Case(parameters=and_others),
    "others": Case(parameters=lambda ddp: and_others(ddp)[-1:], num_warnings=0),
    "none": Case(parameters=lambda ddp: [], num_warnings=0),
    "norm-1": Case(norm_type=1.0),
    "norm-inf": Case(norm_type=float("inf")),
}


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_clip_of_anything_else_does_as_torch(rank: Rank, name: str, as_view: bool) -> None:
    rank.init("gloo")
    case = CASES[name]
    ddp, _ = make_ddp(gradient_as_bucket_view=as_view)
    for step in range(2):
        ddp.zero_grad()
        ddp(exact_batch(rank.rank, step)).backward()
        case.change(ddp)
        parameters = case.parameters(ddp)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        copies = []
        for p in listed:
            copies.append(torch.nn.Parameter(p.detach().clone()))
            copies[-1].grad = p.grad.clone()
        with num_warnings(case.num_warnings if step == 0 else 0):
            norm = rota.clip_grad_norm_(parameters, 2.0, case.norm_type)
        expected = torch.nn.utils.clip_grad_norm_(copies, 2.0, case.norm_type)
        assert torch.equal(norm, expected)
        for p, copy in zip(listed, copies, strict=True):
            assert torch.equal(p.grad, copy.grad)


# ---- folded into a fused optimizer


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
}
# In some versions of torch, some of these take no grad_scale.
FOLDING = [
    name
    for name, make in OPTIMIZERS.items()
    if getattr(make([torch.nn.Parameter(torch.zeros(1))]), "_step_supports_amp_scaling", False)
]


@pytest.mark.parametrize("with_scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("name", FOLDING)
@on_ranks(2)
def test_clip_is_folded_into_a_fused_optimizer(rank: Rank, name: str, with_scaler: bool) -> None:
    """Compares with the same model clipped in place."""
    rank.init("gloo")
    ddps, states = zip(*(make_ddp(make_model()) for _ in range(2)), strict=True)
    folding, plain = (OPTIMIZERS[name](ddp.parameters()) for ddp in ddps)
    scalers = [rota.amp.GradScaler(s, init_scale=8.0, enabled=with_scaler) for s in states]
    for step in range(5):
        max_norm = 0.01 if step != 3 else 1e6
        for ddp, optimizer, scaler in zip(ddps, (folding, plain), scalers, strict=True):
            optimizer.zero_grad()
            batch = batch_of(rank.rank, step)
            if with_scaler and step == 2 and rank.rank == 0:
                batch[0, 0] = torch.inf
            scaler.scale(ddp(batch).square().mean()).backward()
        untouched = gradients(ddps[0].parameters())
        with torch_must_not_look(), num_warnings(0):
            norm = rota.clip_grad_norm_(ddps[0].parameters(), max_norm, optimizer=folding)
            plain_norm = rota.clip_grad_norm_(ddps[1].parameters(), max_norm)
        torch.testing.assert_close(norm, plain_norm, rtol=REL, atol=0, equal_nan=True)
        if norm.isfinite():
            assert hasattr(folding, "grad_scale") == (max_norm < norm) == (step != 3)
            for p, gradient in zip(ddps[0].parameters(), untouched, strict=True):
                assert torch.equal(p.grad, gradient)
        for optimizer, scaler in zip((folding, plain), scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert not hasattr(folding, "grad_scale")
        for p, q in zip(ddps[0].parameters(), ddps[1].parameters(), strict=True):
            # One multiplies by the coefficient; the other divides by its rounded inverse and writes
            # the gradient back. Both start each step from the same parameters, so these differ
            # only by the rounding of one step.
            torch.testing.assert_close(p.grad, q.grad, rtol=REL, atol=0, equal_nan=True)
            torch.testing.assert_close(p, q, rtol=0, atol=10 * REL)
        ddps[1].module.load_state_dict(ddps[0].module.state_dict())


@pytest.mark.parametrize("what", ["unfused", "some-unfused", "part", "more"])
@on_ranks(1)
def test_clip_is_not_folded_where_that_would_be_wrong(rank: Rank, what: str) -> None:
    rank.init("gloo")
    ddp, _ = make_ddp()
    parameters = list(ddp.parameters())
    options: dict[str, Any] = {"fused": True}
    owned: Any = parameters
    if what == "unfused":
        options = {}
    elif what == "some-unfused":
        owned = [{"params": parameters[:2]}, {"params": parameters[2:], "fused": False}]
    elif what == "part":
        owned = parameters[1:]
    elif what == "more":
        other = torch.nn.Parameter(torch.zeros(2))
        other.grad = torch.ones(2)
        owned = [*parameters, other]
    optimizer = torch.optim.SGD(owned, lr=1.0, **options)
    ddp(exact_batch(rank.rank, 0)).backward()
    norm = rota.clip_grad_norm_(parameters, 1.0, optimizer=optimizer)
    assert norm > 1
    assert not hasattr(optimizer, "grad_scale")
    assert norm_of(ddp).item() == pytest.approx(1.0, rel=REL)


def fold(
    rank: Rank, max_norm: float, own_scale: torch.Tensor | None = None
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Tensor]:
    """A model whose clipping waits in its optimizer, which may have a grad_scale, and the norm."""
    rank.init("gloo")
    ddp, _ = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, fused=True)
    if own_scale is not None:
        optimizer.grad_scale = own_scale
    ddp(exact_batch(rank.rank, 0)).backward()
    norm = rota.clip_grad_norm_(ddp.parameters(), max_norm, optimizer=optimizer)
    return ddp, optimizer, norm


@on_ranks(1)
def test_fold_of_a_skipped_step_is_forgotten(rank: Rank) -> None:
    ddp, optimizer, _ = fold(rank, 1.0)
    assert hasattr(optimizer, "grad_scale")
    ddp.zero_grad()  # discards the gradients without a step
    ddp(exact_batch(rank.rank, 1)).backward()
    assert not hasattr(optimizer, "grad_scale")
    gradient = next(ddp.parameters()).grad.clone()
    optimizer.step()
    assert torch.equal(next(ddp.parameters()).detach(), -gradient)


@on_ranks(1)
def test_folds_multiply_each_other_and_the_optimizers_own_grad_scale(rank: Rank) -> None:
    own_scale = torch.tensor(2.0)
    ddp, optimizer, norm = fold(rank, 8.0, own_scale)
    assert rota.clip_grad_norm_(ddp.parameters(), 4.0, optimizer=optimizer).item() == pytest.approx(
        8.0, rel=REL
    )
    gradient = next(ddp.parameters()).grad.clone()
    optimizer.step()
    expected = -gradient * 4.0 / norm / 2.0
    torch.testing.assert_close(next(ddp.parameters()).detach(), expected, rtol=REL, atol=0)
    assert optimizer.grad_scale is own_scale


@on_ranks(1)
def test_fold_is_carried_out_before_torch_reads_the_gradients(rank: Rank) -> None:
    ddp, optimizer, _ = fold(rank, 8.0)
    norm = rota.clip_grad_norm_(ddp.parameters(), 1e6, norm_type=float("inf"))
    assert not hasattr(optimizer, "grad_scale")
    assert norm_of(ddp).item() == pytest.approx(8.0, rel=REL)
    assert norm == max(p.grad.abs().max() for p in ddp.parameters())
