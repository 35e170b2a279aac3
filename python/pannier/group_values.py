"""The numbers of the parameter groups, checked each time that they are read: anybody may write into a group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pannier.errors import ConfigError

_REFUSED = ("amsgrad", "maximize", "differentiable")
_SCALARS = ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "bias_correction")
_SWITCHES = ("nesterov", "bias_correction")
_FROM_ZERO = ("eps", "weight_decay", "momentum", "lr_decay")  # A schedule may round an lr to just below 0.
_ADAM = ("lr", "betas", "eps", "weight_decay")
_NEEDED = {"Adam": _ADAM, "AdamW": _ADAM}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What `initialize` decided by the groups once and for all."""

    has_momentum: bool = True
    """Whether there are buffers for the momentum of SGD."""
    decoupled_weight_decay: bool | None = None
    """Whether the rule is AdamW or Adam; None for other rules."""
    needed: tuple[str, ...] = ("lr",)
    """What each group must have when a step reads it."""


def fixed_by(rule: str, has_momentum: bool = True) -> Fixed:
    """What the core's update `rule` fixes."""
    return Fixed(has_momentum, {"AdamW": True, "Adam": False}.get(rule), _NEEDED.get(rule, ("lr",)))


def hyperparameters(param_groups: Sequence[Mapping[str, Any]], fixed: Fixed) -> list[dict[str, float]]:
    """What the core reads of each group, as it is now. Raises for what can't be."""
    for index, group in enumerate(param_groups):
        if missing := [key for key in fixed.needed if key not in group]:
            raise ConfigError(f"parameter group {index} has no {', '.join(missing)}")
    return [_read(f"parameter group {index}", group, fixed) for index, group in enumerate(param_groups)]


def require_valid_group(name: str, group: Mapping[str, Any], fixed: Fixed | None = None) -> None:
    """Raises where a value of `group` can't be; `name` says in the message which group it is."""
    _read(name, group, fixed or Fixed())


def _read(name: str, group: Mapping[str, Any], fixed: Fixed) -> dict[str, float]:
    for key in _REFUSED:
        if group.get(key):
            raise ConfigError(f"{name} sets {key}, which is not supported")
    decoupled = fixed.decoupled_weight_decay
    if decoupled is not None and bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
        raise ConfigError(
            f"{name} sets decoupled_weight_decay to {group['decoupled_weight_decay']!r}, but it was {decoupled} at "
            "initialize(), which chose the update by it; destroy() the engine and initialize() again"
        )
    values = {key: _number(name, key, group[key]) for key in _SCALARS if key in group}
    if values.get("momentum") and not fixed.has_momentum:
        raise ConfigError(
            f"{name} sets momentum to {group['momentum']!r}, but momentum was 0 in all groups at initialize(), so "
            "there is no momentum_buffer; initialize() with a momentum above 0"
        )
    if "betas" in group:
        values["beta1"], values["beta2"] = _betas(name, group["betas"])
    return values


def _number(name: str, key: str, value: Any) -> float:
    try:
        is_other = isinstance(value, str) or (isinstance(value, bool) and key not in _SWITCHES)
        number = math.nan if is_other else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: {key} must be a finite number, not {value!r}")
    if key in _FROM_ZERO and number < 0:
        raise ConfigError(f"{name}: {key} must be at least 0, not {value!r}")
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
