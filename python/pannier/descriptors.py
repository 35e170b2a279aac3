"""Optimizers by DeepSpeed's names: parameter groups and settings that `initialize` takes over.

Inside an engine the update is the engine's, wherever the states live, and these classes differ only in names and
defaults. Outside of one, `step()` updates parameters on the CPU by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from pannier import core, group_values, managed
from pannier.errors import ConfigError, UsageError


class Descriptor(torch.optim.Optimizer):
    """Holds groups and settings; subclasses name the rule."""

    states: ClassVar[tuple[str, ...]]
    """The names of the rule's states."""

    fp32_optimizer_states: bool = True
    """Whether states that its own `step()` makes are fp32; else they are of the parameter's type. An engine's are fp32, as
    those of DeepSpeed's are, which has fp32 masters for parameters there."""

    @property
    def rule(self) -> str:
        """The core's name of the update."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates parameters that no engine manages, on the CPU. A UsageError for others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Everything is looked at before anything changes.
        numbers = group_values.hyperparameters(self.param_groups, group_values.fixed_by(self.rule))
        for group in self.param_groups:
            for param in group["params"]:
                self._require_plain(param)
        for group, values in zip(self.param_groups, numbers, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, values)
        return loss

    def _require_plain(self, param: torch.Tensor) -> None:
        name = type(self).__name__
        if managed.owner_of(param) is not None:
            raise UsageError(f"an engine manages the parameters of this {name}; call the engine's step()")
        if param.device.type != "cpu" and param.grad is not None:
            raise UsageError(
                f"{name} updates parameters on {param.device} only inside an engine; pass it to initialize() and call "
                "the engine's step()"
            )

    def _update(self, param: torch.Tensor, values: dict[str, float]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
            state.update({name: torch.zeros(param.shape, dtype=dtype) for name in self.states})
        state["step"] += 1
        weight = param.float().contiguous()
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad  # type: ignore[union-attr]
        kept = [state[name].float() for name in self.states]  # The state itself where it is fp32.
        second = kept[1] if len(kept) == 2 else torch.empty(0)
        grad = grad.float().contiguous()
        core.call(torch.ops.pannier.update_tensor, self.rule, weight, grad, kept[0], second, state["step"], values)
        if weight.data_ptr() != param.data_ptr():
            param.copy_(weight)
        for name, value in zip(self.states, kept, strict=True):
            if value is not state[name]:
                state[name].copy_(value)


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(f"{name} does not support amsgrad")


class DeepSpeedCPUAdam(Descriptor):
    """AdamW, or Adam with L2 decay where `adamw_mode` is false."""

    states = ("exp_avg", "exp_avg_sq")

    @property
    def rule(self) -> str:
        """AdamW or Adam."""
        return "AdamW" if self.adam_w_mode else "Adam"

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
        self.fp32_optimizer_states = bool(fp32_optimizer_states)
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

    states = ("exp_avg", "exp_avg_sq")

    @property
    def rule(self) -> str:
        """AdamW or Adam."""
        return "AdamW" if self.adam_w_mode else "Adam"

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

    states = ("sum",)
    rule = "Adagrad"

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
        self.fp32_optimizer_states = bool(fp32_optimizer_states)
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": False})


class DeepSpeedCPULion(Descriptor):
    """Lion."""

    states = ("exp_avg",)
    rule = "Lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = bool(fp32_optimizer_states)
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(Descriptor):
    """Lion."""

    states = ("exp_avg",)
    rule = "Lion"

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
