"""torch.nn.utils.clip_grad_norm_ with the norm that rota.fused_hook has already measured."""

from __future__ import annotations

import functools
import math
import types
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from rota import _torch, options
from rota.gradients.state import HookState, live_states
from rota.sharding import local_of


class _Fold(NamedTuple):
    """The factor by which an optimizer's next step will multiply its gradients."""

    factor: float
    previous: torch.Tensor | None  # the grad_scale that the optimizer had before, if any


_folds: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Fold] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_warned: weakref.WeakSet[HookState] = weakref.WeakSet()


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.Tensor:
    """Clips gradients like torch's function of this name, without a pass to measure the norm.

    rota.fused_hook has measured the L2 norm of all gradients that it reduced in the last backward
    pass, so gradients are only touched if they have to shrink or the norm is not finite. torch's
    function takes over, with one warning per model, for other norms, for other sets of parameters,
    for DTensors with shards on ranks that are not in the state's model_group, and if gradients were
    changed or added to since; with a model_group, that is an error. All ranks decide alike.
    Changes through `grad.data` go unnoticed; change `grad` under torch.no_grad().

    With a rota.amp.GradScaler, call it before or after scaler.unscale_(optimizer). Unscale
    gradients that the hook has not reduced first, as with torch.

    Args:
        parameters: all parameters of the model, or of several models that are trained together.
        max_norm: the largest norm allowed.
        norm_type: 2.0 for the measured norm; others as torch's.
        error_if_nonfinite: raise instead of clipping if the norm is Inf or NaN.
        foreach: as torch's.
        optimizer: the optimizer of exactly these parameters. If it was made with fused=True, this
            call leaves the gradients alone and the optimizer's next step multiplies them, through
            its grad_scale. If that step is skipped, they stay as they are.

    Returns:
        The norm before clipping, a scalar; float32 if the hook has measured it.

    Raises:
        RuntimeError: the norm is not finite, and error_if_nonfinite is set; or torch would have to
            compute it, and the model lies on several ranks.

    Example:
        >>> norm = rota.clip_grad_norm_(ddp.parameters(), 1.0, optimizer=optimizer)
    """
    parameters = options.listed("rota.clip_grad_norm_", parameters)
    with_gradient = {id(p): p for p in parameters if p.grad is not None}
    states = _measured(parameters, with_gradient) if norm_type == 2 else []
    if not states:
        _refuse_sharded(parameters)
        if _of_models(parameters):
            raise RuntimeError(
                "rota.clip_grad_norm_: the norm over the HookState's model_group is that of all "
                "gradients of the model as they were reduced, and cannot be computed otherwise; "
                "clip with norm_type=2 and all parameters of this rank together, after the "
                "reduction and before anything else changes their gradients"
            )
        _warn(with_gradient)
        _multiply_folded(with_gradient)
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    norm_value = math.sqrt(math.fsum(state.results.sum_of_squares for state in states))
    norm = torch.tensor(norm_value, dtype=torch.float32, device="cpu")
    if error_if_nonfinite and not math.isfinite(norm_value):
        raise RuntimeError(
            "rota.clip_grad_norm_: the total norm of the gradients is not finite, so they cannot "
            "be clipped; error_if_nonfinite=False has them scaled by it anyway"
        )
    coefficient = max_norm / (norm_value + 1e-6)  # as torch's, but in float64
    if coefficient >= 1:
        return norm
    fold = optimizer is not None and coefficient > 0 and _can_fold(optimizer, with_gradient)
    if fold:
        assert optimizer is not None
        _fold(optimizer, coefficient)
        for state in states:  # if the step is skipped, undo at the next backward pass
            state.results.at_next_backward(functools.partial(_unfold, weakref.ref(optimizer)))
    else:
        # torch multiplies no list of DTensors and plain tensors, so it gets plain ones.
        gradients = [p.grad for p in with_gradient.values() if p.grad is not None]
        local: Any = [types.SimpleNamespace(grad=local_of(g)) for g in gradients]
        torch.nn.utils.clip_grads_with_norm_(local, max_norm, norm, foreach)
    for state in states:
        state.results.scaled_by(coefficient, in_place=not fold)
    return norm


def _measured(
    parameters: list[torch.Tensor], with_gradient: dict[int, torch.Tensor]
) -> list[HookState]:
    """The states that together measured the norm of exactly these gradients; [] if none did."""
    owners: dict[HookState, None] = {}  # in the order of parameters, the same on every rank
    live = list(live_states)
    for parameter in with_gradient.values():
        owner = next((state for state in live if state.results.is_current(parameter)), None)
        if owner is None or not owner.counts_all_of(parameter):
            return []
        owners[owner] = None
    owners |= dict.fromkeys(s for s in _of_models(parameters) if s.results.is_complete)
    if not all(state.results.is_norm_of(with_gradient.keys()) for state in owners):
        return []
    return list(owners)


def _of_models(parameters: list[torch.Tensor]) -> list[HookState]:
    """The states of models of which these are a part; others may have all the gradients."""
    states = [s for s in live_states if s.model_group is not None and s.results.generation > 0]
    if not parameters:  # a stage without any can only be told if it is the only one
        without = [state for state in states if state.is_for_nothing]
        return without if len(without) == 1 else []
    return [state for state in states if any(state.is_for(p) for p in parameters)]


def _refuse_sharded(parameters: Iterable[torch.Tensor]) -> None:
    """There is no gradient to clip where an optimizer of rota.optim has the sums."""
    for state in live_states:
        if state.is_sharded and any(p.grad is None and state.is_for(p) for p in parameters):
            raise RuntimeError(
                "rota.clip_grad_norm_: these parameters belong to an optimizer of rota.optim, "
                "which keeps their gradients; call optimizer.clip_grad_norm_(max_norm)"
            )


def _warn(with_gradient: dict[int, torch.Tensor]) -> None:
    for state in list(live_states):
        if state not in _warned and any(state.results.saw(p) for p in with_gradient.values()):
            _warned.add(state)
            warnings.warn(
                "rota.clip_grad_norm_: the norm is not that of all gradients as rota.fused_hook "
                "reduced them in the last backward pass, so torch computes it, which takes a pass "
                "over them. It is for norm_type=2 and all parameters of the model together, before "
                "anything else changes their gradients",
                stacklevel=4,
            )


# ---- torch's scaler


def _note_change(optimizer: torch.optim.Optimizer) -> None:
    """Counts unscaling as a change of the gradients; torch's operator leaves their versions."""
    for parameter in options.parameters_of(optimizer):
        current = any(state.results.is_current(parameter) for state in live_states)
        if current and parameter.grad is not None:
            torch.autograd.graph.increment_version(parameter.grad)


_torch.after_unscaling(_note_change)


# ---- a fused optimizer multiplies the gradients while it reads them


def _can_fold(optimizer: torch.optim.Optimizer, with_gradient: dict[int, torch.Tensor]) -> bool:
    stepped = {id(p) for p in options.parameters_of(optimizer) if p.grad is not None}
    return (
        _torch.takes_grad_scale(optimizer)
        and all(group.get("fused") for group in optimizer.param_groups)
        and stepped == with_gradient.keys()
    )


def _fold(optimizer: torch.optim.Optimizer, factor: float) -> None:
    previous = getattr(optimizer, "grad_scale", None)
    grad_scale = torch.tensor(1 / factor, dtype=torch.float32, device="cpu")
    if previous is not None:
        grad_scale = grad_scale * previous
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    if optimizer in _folds:  # clipped twice
        factor, previous = factor * _folds[optimizer].factor, _folds[optimizer].previous
    _folds[optimizer] = _Fold(factor, previous)
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if hasattr(optimizer, "found_inf"):
        _folds.pop(optimizer, None)  # a GradScaler made this step and removes grad_scale
    else:
        _unfold(weakref.ref(optimizer))


def _unfold(ref: weakref.ref[torch.optim.Optimizer]) -> None:
    """Restores the optimizer's previous grad_scale."""
    optimizer = ref()
    fold = _folds.pop(optimizer, None) if optimizer is not None else None
    if fold is None:
        return
    if fold.previous is None:
        vars(optimizer).pop("grad_scale", None)
    else:
        vars(optimizer)["grad_scale"] = fold.previous


def _multiply_folded(with_gradient: dict[int, torch.Tensor]) -> None:
    """Applies pending folds to these gradients now, before they are read."""
    for optimizer, fold in list(_folds.items()):
        gradients = {id(p): p.grad for p in options.parameters_of(optimizer) if p.grad is not None}
        if gradients.keys() & with_gradient.keys():
            _torch.multiply([local_of(g) for g in gradients.values()], fold.factor)
            _unfold(weakref.ref(optimizer))
