"""What the optimizers have in common: each rank has the state of the pieces that it owns."""

from __future__ import annotations

import abc
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rota import _C
from rota.gradients.communicators import communicator_of
from rota.gradients.hooks import fused_hook
from rota.gradients.sharded import OwnedPiece, Sharding, in_memory
from rota.gradients.state import HookState
from rota.options import parameters_of

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOT_HERE = ("foreach", "capturable", "differentiable", "fused")


class ShardedOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer over a HookState; rota.optim.AdamW explains it."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        state: HookState,
        defaults: dict[str, Any],
        *,
        keep_gradients: bool,
    ) -> None:
        self._name = f"rota.optim.{type(self).__name__}"
        for name in _NOT_HERE:
            if defaults.get(name):
                raise ValueError(
                    f"{self._name}: {name} is {defaults[name]!r}; it chooses among torch's ways to "
                    f"update, rota has one of its own: leave it out"
                )
        if not isinstance(state, HookState):
            raise TypeError(
                f"{self._name}: state is of type {type(state).__name__}, expected a rota.HookState"
            )
        self._is_complete = False
        super().__init__(params, defaults)
        self._is_complete = True
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._check_parameters(parameters)
        self._hook_state = state
        self._clip_factor = 1.0
        trained = [p for p in parameters if p.requires_grad]
        communicator = functools.partial(communicator_of, state.group, state.engine)
        self._sharding = Sharding(trained, communicator, keep_gradients)
        state.shard(self._sharding, self._name)
        if state.ddp is not None:
            state.ddp.register_comm_hook(state, fused_hook)
        for parameter in parameters:
            _owner_of[parameter] = weakref.ref(self)

    @property
    def hook_state(self) -> HookState:
        return self._hook_state

    # ---- what each optimizer knows

    @abc.abstractmethod
    def _step_of(self, group: Mapping[str, Any], number: int, factor: float) -> _C.UpdateStep:
        """Step `number`, from 1, of a parameter of the group; factor: of the gradient."""

    @abc.abstractmethod
    def _states_of(self, group: Mapping[str, Any]) -> dict[str, str]:
        """The states of a parameter of the group, by the name that the extension gives them."""

    # ---- the step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters on all ranks; a collective call, which blocks until all have them.

        Parameters that the backward pass did not reach stay as they are, as with torch.

        Raises:
            ValueError: a closure is given.
            rota.Mismatch: the ranks' options differ, such as their learning rates; parameters of
                buckets before may have been updated.
            RuntimeError: no backward pass was reduced since the last step.
        """
        if closure is not None:
            raise ValueError(
                f"{self._name}.step: a closure would run backward again within the step; call "
                f"loss.backward() before it"
            )
        results = self._hook_state.results
        if not results.is_complete or not self._sharding.is_pending:
            raise RuntimeError(
                f"{self._name}.step: no backward pass was reduced since the last step; call "
                f"loss.backward() outside no_sync(), or rota.reduce_gradients, first"
            )
        self._sharding.is_pending = False
        factor = self._clip_factor / results.loss_scale
        self._clip_factor = 1.0
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        alike: dict[tuple[int, int], _C.UpdateStep] = {}  # by group and number
        for bucket in self._sharding.reduced:
            steps: dict[int, _C.UpdateStep] = {}  # by id() of the parameter
            for parameter in bucket.parameters:
                if id(parameter) in self._sharding.used:
                    group, number = group_of[id(parameter)], self._count(parameter)
                    if (id(group), number) not in alike:
                        alike[id(group), number] = self._step_of(group, number, factor)
                    steps[id(parameter)] = alike[id(group), number]
            for own in bucket.own:
                if id(own.parameter) in steps:
                    self._give_state(bucket.core, own, group_of[id(own.parameter)])
            self._sharding.communicator.update_shards(
                bucket.core, [steps.get(id(p)) for p in bucket.parameter_of]
            )
            torch.autograd.graph.increment_version(bucket.parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what a backward pass has reduced is dropped."""
        super().zero_grad(set_to_none)
        self._sharding.is_pending = False
        self._clip_factor = 1.0

    def _count(self, parameter: torch.Tensor) -> int:
        state = self.state[parameter]
        number = torch.zeros((), dtype=torch.float32, device="cpu")  # as torch's
        state["step"] = state.get("step", number) + 1
        return int(state["step"])

    def _give_state(
        self, core: _C.ShardedBucket, own: OwnedPiece, group: Mapping[str, Any]
    ) -> None:
        state = self.state[own.parameter]
        tensors: dict[str, torch.Tensor] = {}
        for theirs, name in self._states_of(group).items():
            if name not in state:
                state[name] = torch.zeros(own.piece.num_elems, dtype=torch.float32, device="cpu")
            tensors[theirs] = state[name]
        if own.parameter.dtype != torch.float32:
            if "master" not in state:
                begin = own.piece.begin
                part = in_memory(own.parameter)[begin : begin + own.piece.num_elems]
                state["master"] = part.float()
            tensors["parameters"] = state["master"]
        core.set_state(own.number, **tensors)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Makes the next step use gradients of at most this L2 norm; a collective call.

        Nothing is multiplied here: the step does it in its one pass.

        Returns:
            The norm before clipping, a float32 scalar, the same bits on every rank and with any
            number of ranks that have the same gradients.

        Raises:
            RuntimeError: no backward pass was reduced; or the norm is not finite, and
                error_if_nonfinite is set.
        """
        norm = self._hook_state.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"{self._name}.clip_grad_norm_: the total norm of the gradients is not finite, so "
                f"they cannot be clipped"
            )
        self._clip_factor = min(1.0, max_norm / (float(norm) + 1e-6))
        return norm

    # ---- saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank, as torch's optimizer of this name has it, in float32; a
        collective call.

        Parameters that are narrower than float32 have their float32 values as "master".
        """
        whole: dict[torch.Tensor, dict[str, Any]] = {
            p: {"step": state["step"].clone()} for p, state in self.state.items()
        }
        for name in self._names(self.param_groups):
            gathered = self._sharding.gather(name, self.state)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter in whole and name in self._names([group], parameter):
                        whole[parameter][name] = gathered[id(parameter)]
        own, self.state = self.state, defaultdict(dict, whole)
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict() of this optimizer, with any number of ranks, or of torch's
        optimizer of this name; every rank loads the same. Waits for nobody.

        Raises:
            ValueError: it is of other parameters; nothing was loaded.
        """
        own = [p for group in self.param_groups for p in group["params"]]
        listed = [i for group in state_dict["param_groups"] for i in group["params"]]
        loaded: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, index in zip(own, listed, strict=False):
            theirs = state_dict["state"].get(index, {})
            if not theirs:
                continue
            piece = self._sharding.own_piece(parameter)
            number = torch.tensor(float(theirs["step"]), dtype=torch.float32, device="cpu")
            state = loaded[parameter] = {"step": number}
            for name, value in theirs.items():
                if name == "step" or not isinstance(value, torch.Tensor):
                    continue
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"{self._name}.load_state_dict: {name} of parameter {index} has shape "
                        f"{list(value.shape)}, the parameter {list(parameter.shape)}; the "
                        f"state_dict is of another model"
                    )
                if piece is not None:
                    like = torch.empty_like(parameter, dtype=torch.float32).copy_(value)
                    end = piece.begin + piece.num_elems
                    state[name] = in_memory(like)[piece.begin : end].clone()
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)

    def _names(
        self, groups: Iterable[Mapping[str, Any]], parameter: torch.Tensor | None = None
    ) -> set[str]:
        """What the state of a parameter, or of any, consists of beside "step"."""
        names: set[str] = set()
        for group in groups:
            names |= set(self._states_of(group).values())
            parameters = group["params"] if parameter is None else [parameter]
            if any(p.dtype != torch.float32 for p in parameters):
                names.add("master")
        return names

    # ---- what the user may do wrong

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: which rank owns what depends on all parameters."""
        if self._is_complete:
            raise RuntimeError(
                f"{self._name}.add_param_group: the ranks own pieces of the parameters that the "
                f"optimizer was made with; make a new one, and give it this one's state_dict()"
            )
        super().add_param_group(param_group)

    def _check_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for i, parameter in enumerate(parameters):
            if parameter.dtype not in _DTYPES or parameter.device.type != "cpu":
                raise TypeError(
                    f"{self._name}: parameter {i} is {parameter.dtype} on {parameter.device}, "
                    f"expected one of {_DTYPES} on the CPU; use torch's optimizer for it"
                )
            owner = _owner_of.get(parameter, lambda: None)()
            if owner is not None and any(parameter is p for p in parameters_of(owner)):
                raise ValueError(
                    f"{self._name}: parameter {i}, shape {list(parameter.shape)}, has another "
                    f"optimizer of rota.optim, {type(owner).__name__}; delete that one first"
                )


_owner_of = WeakTensorKeyDictionary()  # weak references to optimizers, by parameter
