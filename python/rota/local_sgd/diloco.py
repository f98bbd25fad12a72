"""DiLoCo: Local SGD whose mean difference is the gradient of an outer optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rota import options
from rota.gradients.state import HookState
from rota.local_sgd.checks import check_optimizer
from rota.local_sgd.local_sgd import SAVED, LocalSGD
from rota.local_sgd.synced import Synced


class DiLoCo(LocalSGD):
    """DiLoCo: every `sync_every` steps, an outer optimizer steps along the mean difference.

    Otherwise as LocalSGD, which outer SGD with lr=1 and no momentum is.

    Args:
        outer_optimizer: of all of the model's parameters, without steps taken: this puts the
            float32 copies in their places, so that nothing else may step it. Its learning rate may
            change at any time, alike on all ranks, which is compared. The paper uses SGD with
            Nesterov momentum of 0.9 and lr=0.7.

    Example:
        >>> outer_optimizer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        >>> state = rota.HookState(wire_dtype=torch.float8_e4m3fn, error_feedback=True)
        >>> outer = rota.local_sgd.DiLoCo(model, outer_optimizer, sync_every=32, state=state)
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        state: HookState | None = None,
        num_fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        self.outer_optimizer = outer_optimizer
        super().__init__(
            model,
            sync_every,
            state=state,
            num_fragments=num_fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
        )
        copies: dict[int, torch.Tensor] = {
            id(synced.parameter): synced.copy for synced in self._synced
        }
        for group in outer_optimizer.param_groups:
            # In place: some optimizers keep the list. Aliases without gradients take the places of
            # frozen parameters, which may have gradients from before they were frozen.
            group["params"][:] = [copies.get(id(p), p.detach()) for p in group["params"]]
        self._is_outer_step = False
        outer_optimizer.register_step_pre_hook(self._check_is_outer_step)

    def _check_arguments(self, module: nn.Module, num_tensors: int) -> None:
        check_optimizer(module, self.outer_optimizer)
        super()._check_arguments(module, num_tensors)

    def _other_arguments(self) -> dict[str, str]:
        plain = (int, float, str, tuple, list, torch.Tensor)
        groups = [
            ", ".join(f"{name}={x}" for name, x in group.items() if isinstance(x, plain))
            for group in ({**g, "params": None} for g in self.outer_optimizer.param_groups)
        ]
        return {"outer_optimizer": f"{type(self.outer_optimizer).__name__}({'; '.join(groups)})"}

    def _agreed(self) -> dict[str, float]:
        rates = [group.get("lr", 0.0) for group in self.outer_optimizer.param_groups]
        groups = [f" in parameter group {i}" for i in range(len(rates))] if len(rates) > 1 else [""]
        named = zip(groups, rates, strict=True)
        return super()._agreed() | {f"outer_optimizer's lr{of}": float(x) for of, x in named}

    def _check_is_outer_step(self, *_: object) -> None:
        if not self._is_outer_step:
            raise ValueError(
                "rota.DiLoCo: outer_optimizer.step() was called; only outer steps call it: make "
                "another optimizer for the inner steps"
            )

    def _update_copies(self, fragment: Sequence[Synced]) -> None:
        self._is_outer_step = True
        try:
            self.outer_optimizer.step()  # passes over copies of other fragments: no gradients
        finally:
            self._is_outer_step = False
        super()._update_copies([s for s in fragment if s.parameter is None])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        options.check_state_dict(self._name, state_dict, [*SAVED, "outer_optimizer"])
        super().load_state_dict(state_dict)
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
