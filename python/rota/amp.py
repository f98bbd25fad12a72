"""torch.amp.GradScaler for gradients that rota.fused_hook has already unscaled and checked.

From one update() to the next, a gradient is either in scaled units or a result, which the hook has
divided by the scale.

    scale(loss)      Sets the states' loss_scale, so that the hook divides by the scale. Gradients
                     that became results since the last update() will be added to, so they are
                     multiplied by the scale again. That takes a pass over them: accumulate under
                     no_sync(), where the hook does not run.
    backward()       Under no_sync() gradients accumulate in scaled units. Otherwise the hook
                     reduces and unscales the accumulated gradients, which become results.
    unscale_, step   Results stay as they are. If the hook found no Inf or NaN and no gradient has
                     changed since, they are not read. Otherwise this optimizer's results are
                     checked, so that it skips its step when it would with torch's scaler. All other
                     gradients are unscaled and checked by torch's own code.
    update()         Makes the hook divide by 1; no gradient counts as a result any more.

The hook's results have the same bits on all ranks, so all ranks decide alike. If a model lies on
several ranks, an Inf or NaN in any of its gradients skips the step on all of them.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from rota import _torch
from rota.gradients.state import HookState
from rota.options import parameters_of
from rota.sharding import local_of


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler without its pass over the gradients: rota.fused_hook unscales them.

    Use it like torch's, and clip before or after unscale_(): gradients that the hook has reduced
    are already unscaled when backward() returns. The scaler unscales others as torch's does, with
    one warning. It sets no grad_scale on optimizers with fused=True.

    If a state has a model_group, all of its ranks skip a step together. Call scale() and update()
    on every rank, also on stages without a loss: scaler.scale(torch.ones(())) is the loss's factor.

    Args:
        states: the HookState of each model whose loss is scaled; the scaler sets their
            loss_scale.
        device: the device of the scale.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.

    Raises:
        TypeError: an element is not a HookState.

    Example:
        >>> scaler = rota.amp.GradScaler(state)
        >>> scaler.scale(loss).backward()
        >>> rota.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(
        self,
        states: HookState | Iterable[HookState],
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._states = list(states) if isinstance(states, Iterable) else [states]
        for state in self._states:
            if not isinstance(state, HookState):
                raise TypeError(
                    f"rota.amp.GradScaler: states holds a {type(state).__name__}, expected the "
                    f"rota.HookState that is registered on the model, or several"
                )
        self._warned: set[str] = set()
        self._start_iteration()

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale like torch's; call it right before the backward pass."""
        if self.is_enabled():
            scale = self.get_scale()
            for state in self._states:
                if self._has_results(state):
                    self._scale_again(state, scale)
                state.loss_scale = scale
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Calls optimizer.step(*args, **kwargs) if its gradients are finite, like torch's."""
        if self.is_enabled():
            if _torch.unscaled_by(self)[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)  # otherwise torch lets a fused optimizer unscale
            self._stepped.update(id(parameter) for parameter in parameters_of(optimizer))
            if any(state.has_memory for state in self._states):
                found = _torch.unscaled_by(self)[id(optimizer)]["found_inf_per_device"]
                self._tell(optimizer, was_used=not any(found.values()))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale like torch's."""
        for optimizer in self._unscaled:
            self._tell(optimizer, was_used=False)  # the loop has left out its step
        if self.is_enabled():
            for state in filter(self._has_reduced, self._states):
                if state.model_group is not None:
                    # All ranks of a model adapt the scale alike, one without an optimizer, too.
                    found = torch.tensor(
                        float(state.results.found_inf), dtype=torch.float32, device="cpu"
                    )
                    record = _torch.unscaled_by(self)[id(state)]
                    record["found_inf_per_device"] = {found.device: found}
        super().update(new_scale)
        self._start_iteration()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's; the two classes can load each other's state_dict()."""
        super().load_state_dict(state_dict)
        self._start_iteration()

    def _start_iteration(self) -> None:
        # The generation of the results that the last iteration used, by state.
        self._used = {state: state.results.generation for state in self._states}
        self._stepped: set[int] = set()  # parameters, by identity
        self._unscaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        if self.is_enabled():
            for state in self._states:
                state.loss_scale = 1.0

    def _has_reduced(self, state: HookState) -> bool:
        """Whether a backward pass of this iteration was reduced, whatever came later."""
        return state.results.generation != self._used[state]

    def _has_results(self, state: HookState) -> bool:
        results = state.results
        return (
            results.is_complete
            and self._has_reduced(state)
            and results.loss_scale == self.get_scale()
        )

    def _tell(self, optimizer: torch.optim.Optimizer, was_used: bool) -> None:
        for state in filter(self._has_reduced, self._states):
            seen = [p for p in parameters_of(optimizer) if id(p) in state.results.seen]
            state.results.outcome.tell(seen, was_used)

    def _scale_again(self, state: HookState, scale: float) -> None:
        gradients = [
            local_of(gradient)
            for parameter, gradient in state.results.gradients()
            if id(parameter) not in self._stepped  # its optimizer has already stepped
        ]
        state.results.forget()
        if gradients:
            self._warn_once(
                "scaled again",
                "scale() was called again after a backward pass that reduced "
                "gradients, so they are multiplied by the scale, to be added to. This is right, "
                "but takes a pass over all gradients: call all but the last backward() of a step "
                "under DistributedDataParallel.no_sync()",
            )
            with torch.no_grad():
                _torch.multiply(gradients, scale)

    def _unscale(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        self._unscaled.add(optimizer)
        if isinstance(sharded := getattr(optimizer, "hook_state", None), HookState):
            return {found_inf.device: found_inf.fill_(self._found_inf_of(sharded))}
        states = list(filter(self._has_results, self._states))
        results: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                is_result = any(state.results.saw(parameter) for state in states)
                (results if is_result else others).append(parameter)
        found_by_device: dict[torch.device, torch.Tensor] = {}

        def unscale(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
            # Of an optimizer, torch's unscaling reads these alone.
            some: Any = types.SimpleNamespace(param_groups=[{"params": parameters}])
            found_by_device.update(_torch.unscale(self, some, factor, found_inf, allow_fp16))

        if others:
            self._warn_once(
                "not reduced",
                f"{len(others)} of the {len(others) + len(results)} gradients "
                f"of {type(optimizer).__name__} were not reduced by rota.fused_hook in the last "
                f"backward pass, so they are unscaled by torch. This is right, but takes a pass "
                f"over them",
            )
            unscale(others, inv_scale)
        if results:
            if not allow_fp16 and any(p.dtype == torch.float16 for p in results):
                raise ValueError("Attempting to unscale FP16 gradients.")  # as torch's
            found = found_by_device.setdefault(found_inf.device, found_inf)
            if not _are_finite(results, states):
                found.fill_(1.0)
            # Those of other shards are not known here; torch's code asks their ranks.
            cut = [
                p
                for p in results
                if not any(s.results.saw(p) and s.counts_all_of(p) for s in states)
            ]
            if cut:
                unscale(cut, torch.ones_like(inv_scale))
        of_models = [  # the other ranks of these models step together with this optimizer
            state
            for state in filter(self._has_reduced, self._states)
            if state.model_group is not None and any(map(state.is_for, parameters_of(optimizer)))
        ]
        if of_models:
            found = found_by_device.setdefault(found_inf.device, found_inf)
            if any(state.results.found_inf for state in of_models):
                found.fill_(1.0)  # wherever in the model it was
        return found_by_device

    def _found_inf_of(self, state: HookState) -> bool:
        """That of an optimizer of rota.optim, whose step unscales."""
        if state not in self._states:
            raise ValueError(
                "rota.amp.GradScaler: the optimizer's HookState is not among those that the scaler "
                "was made with; pass it: rota.amp.GradScaler(state)"
            )
        return state.found_inf

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"rota.amp.GradScaler: {text}", stacklevel=4)


_torch.override_unscaling(GradScaler, GradScaler._unscale)


def _are_finite(parameters: list[torch.Tensor], states: list[HookState]) -> bool:
    """Whether all gradients are finite; reads them only if the hook's results cannot tell."""
    if not any(state.found_inf for state in states) and all(
        any(state.results.is_current(parameter) for state in states) for parameter in parameters
    ):
        return True
    return all(bool(local_of(p.grad).isfinite().all()) for p in parameters if p.grad is not None)
