"""What an optimizer's `load_state_dict` is given, looked at in full before anything of it is applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pannier.errors import ConfigError
from pannier.group_values import Fixed, require_valid_group

_COUNT_LIMIT = 2**53  # Steps travel as double in torch's own state dicts.


def require_groups(groups: Sequence[Mapping[str, Any]], saved_groups: Any, fixed: Fixed) -> list[int]:
    """The parameters' saved numbers in the order of the groups. Raises for groups that do not fit `groups`."""
    if not isinstance(saved_groups, (list, tuple)) or not all(isinstance(saved, Mapping) for saved in saved_groups):
        raise ConfigError("saved param_groups must be a list of dicts")
    if len(saved_groups) != len(groups):
        raise ConfigError(f"the saved optimizer has {len(saved_groups)} parameter groups, this one {len(groups)}")
    numbers: list[int] = []
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        params = saved.get("params")
        if not isinstance(params, (list, tuple)):
            raise ConfigError(f"saved parameter group {index} holds no list of params")
        if len(group["params"]) != len(params):
            raise ConfigError(f"parameter group {index}: {len(params)} parameters saved, {len(group['params'])} here")
        for key in ("lr", "betas"):
            if key in group and key not in saved:
                raise ConfigError(f"saved parameter group {index} has no {key}")
        require_valid_group(f"saved parameter group {index}", saved, fixed)
        numbers += params
    if not all(_is_count(number) for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise ConfigError(f"the params of the saved parameter groups must number 0 to {len(numbers) - 1}, each once")
    return numbers


def require_states(params: Sequence[torch.Tensor], numbers: Sequence[int], states: Any, keys: set[str]) -> None:
    """Raises for states that do not fit `params`. `keys` are those of the core's that are tensors."""
    if not isinstance(states, Mapping):
        raise ConfigError(f"saved state must be a dict, not {type(states).__name__}")
    if unknown := [number for number in states if number not in numbers]:
        raise ConfigError(f"saved state of parameter {unknown[0]!r}, which is in no saved parameter group")
    for param, number in zip(params, numbers, strict=True):
        state = states.get(number, {})
        if not isinstance(state, Mapping):
            raise ConfigError(f"saved state of parameter {number} must be a dict, not {type(state).__name__}")
        if "step" in state:
            step_of(state["step"], f"saved step of parameter {number}")
        needed = keys - {"fp32_param", "momentum_buffer"}
        if (missing := needed - state.keys()) and state.keys() & {"step", *needed}:
            raise ConfigError(f"saved state of parameter {number} has no {', '.join(sorted(missing))}")
        for key, value in state.items():
            if key != "step" and (key in keys or isinstance(value, torch.Tensor)):
                require_tensor(value, param, f"saved state {key} of parameter {number}", f"parameter {number}")


def require_tensor(value: Any, param: torch.Tensor, what: str, of: str) -> None:
    """Raises for a state that is not a real tensor of the parameter's shape. None stands for a state not yet made."""
    if value is None and "momentum_buffer" in what:
        return
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{what} must be a tensor, not {value!r}")
    if value.shape != param.shape:
        raise ConfigError(f"{what} has shape {tuple(value.shape)}, {of} {tuple(param.shape)}")
    if value.is_complex() or value.dtype is torch.bool:
        raise ConfigError(f"{what} has dtype {value.dtype}, which is not a real number")


def step_of(value: Any, what: str) -> int:
    """A step count as an int, from an int or from a number that torch keeps as a tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < _COUNT_LIMIT or value != int(value):
        raise ConfigError(f"{what} must be a whole number from 0, not {value!r}")
    return int(value)


def require_scaler(saved: Any, present: Mapping[str, float]) -> None:
    """Raises for a loss scaler that lacks a value of `present`, or holds one that is not a number."""
    if not isinstance(saved, Mapping):
        raise ConfigError(f"saved loss_scaler must be a dict, not {type(saved).__name__}")
    if missing := present.keys() - saved.keys():
        raise ConfigError(f"saved loss_scaler has no {', '.join(sorted(missing))}")
    for key, value in saved.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"saved loss_scaler: {key} must be a finite number, not {value!r}")
        if key == "scale" and value <= 0:
            raise ConfigError(f"saved loss_scaler: scale must be above 0, not {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
