"""Says once when torch's own tools are applied to parameters of an engine, where they would quietly do nothing.

Gradients of managed parameters move into the engine's buckets, so `.grad` is None after backward: clipping them by hand
returns a norm of 0, and another optimizer's step changes nothing.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pannier import managed
from pannier.optimizer import Optimizer

_log = logging.getLogger("pannier")
_checked_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_said: set[str] = set()  # "Once" is once a process.


@functools.cache
def watch() -> None:
    """Starts watching; called by the first `initialize`."""
    register_optimizer_step_pre_hook(_before_step)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        watched = _watched(getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, watched)
        setattr(torch.nn.utils.clip_grad, name, watched)
    for name in ("step", "unscale_"):
        setattr(torch.amp.GradScaler, name, _watched_scaler(getattr(torch.amp.GradScaler, name)))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, Optimizer) or optimizer in _checked_optimizers:
        return
    _checked_optimizers.add(optimizer)
    if any(_is_managed(param) for group in optimizer.param_groups for param in group["params"]):
        _say(
            f"{type(optimizer).__name__}.step()",
            "changes nothing: gradients of managed parameters belong to the engine. Call engine.step()",
        )


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if function.__name__ not in _said and any(_is_managed(param) for param in params):
            _say(
                function.__name__,
                "finds no gradients on managed parameters. Set gradient_clipping in the config; "
                "safe_get_full_grad() reads a gradient and engine.get_global_grad_norm() the norm",
            )
        return function(params, *args, **kwargs)

    return watched


def _watched_scaler(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "GradScaler" not in _said and any(
            _is_managed(p) for group in optimizer.param_groups for p in group["params"]
        ):
            _say("GradScaler", "can't work on managed parameters: the engine scales the loss. Set fp16 in the config")
        return method(scaler, optimizer, *args, **kwargs)

    return watched


def _is_managed(param: Any) -> bool:
    return isinstance(param, torch.Tensor) and managed.owner_of(param) is not None


def _say(what: str, message: str) -> None:
    if what not in _said:
        _said.add(what)
        _log.warning("%s %s", what, message)
