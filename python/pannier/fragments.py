"""Reading and writing what the engine keeps for a parameter, in full shape and fp32: DeepSpeed's `safe_get_full_*`.

All of them return None, or do nothing, for a parameter that no engine manages or that has no such thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pannier import arguments, core, managed
from pannier.engine import Engine


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """A copy of the fp32 master weight."""
    return _state(param, "fp32_param")


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the fp32 master weight, and the parameter with it."""
    _set_state(param, "fp32_param", value)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """A copy of an optimizer state, such as "exp_avg"."""
    return _state(param, optim_state_key)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes an optimizer state."""
    _set_state(param, optim_state_key, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """A copy of the averaged, unscaled gradient of the pending window; there is one between backward and step."""
    owner = _owner_with_states(param)
    return None if owner is None else core.call(owner[0].core.grad_tensor, owner[1])


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the averaged, unscaled gradient of the pending window."""
    arguments.require_tensor("value", value)
    owner = _owner_with_states(param)
    if owner is not None:
        core.call(owner[0].core.set_grad_tensor, owner[1], value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replaces each gradient by `update_func(gradient, parameter)`."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _owner_with_states(param: torch.Tensor) -> tuple[Engine, int] | None:
    owner = managed.owner_of(param)
    if owner is None or owner[0].optimizer is None or id(param) not in owner[0].optimizer.state_indices:
        return None
    return owner


def _state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    owner = _owner_with_states(param)
    if owner is None:
        return None
    engine, index = owner
    if key != "fp32_param" and key not in core.call(engine.core.state_keys):
        return None
    return core.call(engine.core.state_tensor, index, key)


def _set_state(param: torch.Tensor, key: str, value: torch.Tensor) -> None:
    arguments.require_tensor("value", value)
    owner = _owner_with_states(param)
    if owner is not None:
        core.call(owner[0].core.set_state_tensor, owner[1], key, value)
