"""The numbers of the parameter groups, checked each time that they are read: anybody may write into a group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pannier.errors import ConfigError

_REFUSED = ("amsgrad", "maximize", "differentiable")
_SCALARS = ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "bias_correction")


def hyperparameters(param_groups: Sequence[Mapping[str, Any]], has_momentum: bool = True) -> list[dict[str, float]]:
    """What the core reads of each group, as it is now. Raises for what can't be.

    `has_momentum` says whether there are buffers for the momentum of SGD, which only `initialize` makes.
    """
    return [_read(f"parameter group {index}", group, has_momentum) for index, group in enumerate(param_groups)]


def require_valid_group(name: str, group: Mapping[str, Any], has_momentum: bool = True) -> None:
    """Raises where a value of `group` can't be; `name` says in the message which group it is."""
    _read(name, group, has_momentum)


def _read(name: str, group: Mapping[str, Any], has_momentum: bool) -> dict[str, float]:
    for key in _REFUSED:
        if group.get(key):
            raise ConfigError(f"{name} sets {key}, which is not supported")
    values = {key: _number(name, key, group[key]) for key in _SCALARS if key in group}
    if values.get("momentum") and not has_momentum:
        raise ConfigError(
            f"{name} sets momentum to {group['momentum']!r}, but momentum was 0 in all groups at initialize(), so "
            "there is no momentum_buffer; initialize() with a momentum above 0"
        )
    if "betas" in group:
        values["beta1"], values["beta2"] = _betas(name, group["betas"])
    return values


def _number(name: str, key: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: {key} must be a finite number, not {value!r}")
    return number


def _betas(name: str, betas: Any) -> tuple[float, float]:
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: betas must be two numbers, not {betas!r}") from None
    numbers = _number(name, "betas", beta1), _number(name, "betas", beta2)
    if not all(0 <= number < 1 for number in numbers):
        raise ConfigError(f"{name}: betas must be from 0 to below 1, not {betas!r}")
    return numbers
