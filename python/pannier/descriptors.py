"""Optimizers by DeepSpeed's names, as descriptions: parameter groups and settings that `initialize` takes over.

The update itself is the engine's, wherever the states live, so these classes differ only in names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pannier.errors import ConfigError, UsageError


class Descriptor(torch.optim.Optimizer):
    """Holds groups and settings. `step()` is the engine's business."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Raises: an optimizer of this kind only works inside an engine."""
        raise UsageError(
            f"{type(self).__name__} describes an optimizer; pass it to initialize() and call the engine's step()"
        )


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(f"{name} does not support amsgrad")


class DeepSpeedCPUAdam(Descriptor):
    """AdamW, or Adam with L2 decay where `adamw_mode` is false."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _no_amsgrad("DeepSpeedCPUAdam", amsgrad)
        if not fp32_optimizer_states:
            raise ConfigError("fp32_optimizer_states=False is not supported: the moments are kept in fp32")
        self.adam_w_mode = bool(adamw_mode)
        super().__init__(
            model_params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "amsgrad": False,
            },
        )


class FusedAdam(Descriptor):
    """AdamW, or Adam with L2 decay where `adam_w_mode` is false."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _no_amsgrad("FusedAdam", amsgrad)
        self.adam_w_mode = bool(adam_w_mode)
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )


class DeepSpeedCPUAdagrad(Descriptor):
    """Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _no_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        if not fp32_optimizer_states:
            raise ConfigError("fp32_optimizer_states=False is not supported: the sums are kept in fp32")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": False})


class DeepSpeedCPULion(Descriptor):
    """Lion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ConfigError("fp32_optimizer_states=False is not supported: the momentum is kept in fp32")
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(Descriptor):
    """Lion."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
