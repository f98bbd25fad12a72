"""The state of a ParameterServer as state_dict() returns it: by name of the parameter.

Servers hold whole parameters, so that a state by name fits any number of them. Each server packs
what it holds into a save, which a worker reads and puts together with those of the other servers.
This module knows what a state consists of; it must not know how a save travels, nor when it is
made.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rota.shared.memory import empty

_NAME = "rota.ParameterServer.load_state_dict"


class Save(NamedTuple):
    """What one server holds; dicts are by number of the parameter."""

    num_updates: int
    values: dict[int, torch.Tensor]  # float32
    # The optimizer's, which is there unless weights are averaged.
    states: dict[int, dict[str, Any]] | None
    options: dict[int, dict[str, Any]] | None  # of its param_groups, such as "lr"

    def packed(self) -> torch.Tensor:
        """The save's bytes, uint8, in memory that other processes can map."""
        torch.save(tuple(self), file := io.BytesIO())
        memory = empty(file.tell(), dtype=torch.uint8)
        return memory.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))

    @classmethod
    def unpacked(cls, memory: torch.Tensor) -> Save:
        file = io.BytesIO(memory.numpy().tobytes())
        return cls(*torch.load(file, weights_only=False))  # written by another rank of the group


def numbers_by_group(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[list[int]]:
    """The numbers of an optimizer's parameters, by group, in the order of its state_dict()."""
    number_of = {id(p): number for p, number in zip(parameters, numbers, strict=True)}
    return [[number_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def by_number(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[int]]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """An optimizer's state and options of each parameter, in groups as from numbers_by_group()."""
    states: dict[int, dict[str, Any]] = {}
    options: dict[int, dict[str, Any]] = {}
    for group, numbers in zip(state_dict["param_groups"], groups, strict=True):
        own_options = {key: value for key, value in group.items() if key != "params"}
        for index, number in zip(group["params"], numbers, strict=True):
            states[number] = state_dict["state"].get(index, {})
            options[number] = own_options
    return states, options


def merged(saves: Iterable[Save], names: Sequence[str]) -> dict[str, Any]:
    """The whole state of all servers' saves; names are by number of the parameter."""
    saves = list(saves)
    values: dict[int, torch.Tensor] = {}
    states: dict[int, dict[str, Any]] = {}
    options: dict[int, dict[str, Any]] = {}
    for save in saves:
        # Each gets memory of its own.
        values |= {number: value.clone() for number, value in save.values.items()}
        states |= save.states or {}
        options |= save.options or {}

    def by_name(numbered: Mapping[int, Any]) -> dict[str, Any]:
        return {names[number]: numbered[number] for number in sorted(numbered)}

    has_optimizer = all(save.states is not None for save in saves)
    return {
        "num_updates": max(save.num_updates for save in saves),
        "parameters": by_name(values),
        "optimizer": {"state": by_name(states), "param_groups": by_name(options)}
        if has_optimizer
        else None,
    }


def check(state_dict: object, shapes: Mapping[str, torch.Size], average_weights: bool) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{_NAME}: state_dict is of type {type(state_dict).__name__}, expected a dict as "
            f"rota.ParameterServer.state_dict() returns it"
        )
    _check_keys("state_dict", state_dict, ["num_updates", "parameters", "optimizer"])
    num_updates = state_dict["num_updates"]
    if not isinstance(num_updates, int) or num_updates < 0:
        raise ValueError(f"{_NAME}: num_updates is {num_updates!r}, expected an int of 0 or more")
    _check_names('state_dict["parameters"]', state_dict["parameters"], shapes.keys())
    for name, shape in shapes.items():
        value = state_dict["parameters"][name]
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"{_NAME}: {name} is {what} in state_dict, expected torch.float32")
        if value.shape != shape:
            raise ValueError(
                f"{_NAME}: {name} has shape {list(value.shape)} in state_dict, the parameter "
                f"{list(shape)}; load the state of the same model"
            )
    optimizer = state_dict["optimizer"]
    if (optimizer is None) != average_weights:
        was, is_now = ("without", "with") if optimizer is None else ("with", "without")
        raise ValueError(
            f"{_NAME}: state_dict was saved {was} an optimizer, but this has been made {is_now} "
            f"one; make it with the same average_weights, or leave load_state_dict out and start "
            f'from the values in state_dict["parameters"]'
        )
    if optimizer is not None:
        _check_keys('state_dict["optimizer"]', optimizer, ["state", "param_groups"])
        for key in ("state", "param_groups"):
            _check_names(f'state_dict["optimizer"]["{key}"]', optimizer[key], shapes.keys())


def _check_keys(where: str, given: object, expected: Iterable[str]) -> None:
    missing = [key for key in expected if not isinstance(given, Mapping) or key not in given]
    if missing:
        raise ValueError(
            f"{_NAME}: {where} lacks {missing}, expected what rota.ParameterServer.state_dict() "
            f"returns"
        )


def _check_names(where: str, given: object, expected: Iterable[str]) -> None:
    names = set(given) if isinstance(given, Mapping) else set()
    missing, others = sorted(set(expected) - names), sorted(names - set(expected))
    if missing or others:
        raise ValueError(
            f"{_NAME}: {where} is not of these parameters: it lacks {missing} and has {others}; "
            f"load the state of the same model, with the same parameters frozen"
        )


def residuals_of(
    state_dict: Mapping[str, Any], shapes: Mapping[str, torch.Size], worker: int, num_workers: int
) -> dict[str, torch.Tensor]:
    """What error feedback owes of a state, by name; empty if another worker, or one of another
    number of workers, has saved it."""
    residuals: dict[str, torch.Tensor] = state_dict.get("residuals", {})
    saved_by = state_dict.get("worker"), state_dict.get("num_workers")
    if not residuals or saved_by != (worker, num_workers):
        return {}
    _check_names('state_dict["residuals"]', residuals, shapes.keys())
    for name, shape in shapes.items():
        if _shape(residuals[name]) != list(shape):
            raise ValueError(
                f"{_NAME}: the residual of {name} has shape {_shape(residuals[name])} in "
                f"state_dict, the parameter {list(shape)}; load the state of the same model"
            )
    return residuals


def for_optimizer(
    state_dict: Mapping[str, Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    probed: Mapping[str, Any],
    may_grow: bool,
) -> dict[str, Any]:
    """What a server's optimizer loads: copies of its parameters' part of a checked state, which has
    the entries of `probed`, an optimizer's like it after a step, or more if it may grow."""
    saved = state_dict["optimizer"]
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    for own, numbers in zip(probed["param_groups"], groups, strict=True):
        options = dict(own)
        for index, number in zip(own["params"], numbers, strict=True):
            name = names[number]
            given = {"params": own["params"], **saved["param_groups"][name]}
            if unknown := sorted(given.keys() - own.keys()):
                raise ValueError(
                    f"{_NAME}: the optimizer of {name} was saved with the options {unknown}, which "
                    f"this one does not have; pass the same make_optimizer"
                )
            if index != own["params"][0]:
                _check_one_group(options, given, names[numbers[0]], name)
            options |= given
            state = saved["state"][name]
            _check_state(name, state, probed["state"].get(index, {}), may_grow)
            if state:
                packed["state"][index] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                }
        packed["param_groups"].append(options)
    return packed


def _check_one_group(
    options: Mapping[str, Any], others: Mapping[str, Any], name: str, other_name: str
) -> None:
    for key, option in others.items():
        if key != "params" and not _are_equal(options[key], option):
            raise ValueError(
                f"{_NAME}: {name} and {other_name} are in one group of the optimizer, but were "
                f"saved with {key} {options[key]!r} and {option!r}; pass a make_optimizer that "
                f"makes the same groups"
            )


def _are_equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _check_state(
    name: str, state: Mapping[str, Any], expected: Mapping[str, Any], may_grow: bool
) -> None:
    """An optimizer that has taken no step has no state."""
    if not state:
        return
    missing, others = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or (others and not may_grow):
        raise ValueError(
            f"{_NAME}: the optimizer's state of {name} lacks {missing} and has {others}; pass the "
            f"same make_optimizer"
        )
    for key, like in expected.items():
        given, shape = state[key], _shape(like)
        if _shape(given) != shape:
            raise ValueError(
                f"{_NAME}: {key} of {name} has shape {_shape(given)} in the optimizer's state, "
                f"expected {shape}; load the state of the same model and optimizer"
            )


def _shape(value: object) -> list[int] | None:
    return list(value.shape) if isinstance(value, torch.Tensor) else None
