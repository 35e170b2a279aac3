"""What the engine is compared with: a model whose gradients the test chooses, and plain optimizers in double."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
Gradients = dict[str, torch.Tensor]


class Zoo(nn.Module):
    """One of each kind of parameter. The loss is linear, so d loss / d parameter is what the caller passes in."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.embedding = nn.Parameter(torch.randn(4, 6, generator=draw))
        self.matrix = nn.Parameter(torch.randn(5, 7, generator=draw))
        self.frozen = nn.Parameter(torch.randn(3, generator=draw), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2, generator=draw))
        self.sometimes = nn.Parameter(torch.randn(9, generator=draw))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.75))
        self.turned = nn.Parameter(torch.randn(3, 5, generator=draw).t())
        self.long = nn.Parameter(torch.randn(5001, generator=draw))
        self.head = self.embedding

    def forward(self, grads: Gradients) -> torch.Tensor:
        loss = (self.frozen.float() * 0).sum()
        for name, grad in grads.items():
            param = getattr(self, name.removesuffix("+"))
            loss = loss + (param.float() * grad).sum()
        return loss


def gradients(step: int, micro: int, dtype: torch.dtype) -> Gradients:
    """Gradients that `dtype` holds exactly. The tied parameter gets two; one parameter gets some every other step."""
    draw = torch.Generator().manual_seed(1000 * step + micro)
    model = Zoo()
    result = {}
    for name, param in model.named_parameters():
        if name in ("frozen", "unused") or (name == "sometimes" and step % 2 == 1):
            continue
        result[name] = torch.randn(param.shape, generator=draw).to(dtype).float()
    result["embedding"] = torch.randint(-9, 10, model.embedding.shape, generator=draw) / 8
    result["embedding+"] = torch.randint(-9, 10, model.embedding.shape, generator=draw) / 8
    return result


class Lion(torch.optim.Optimizer):
    """Lion as its paper has it."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = (beta1 * momentum + (1 - beta1) * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                momentum.mul_(beta2).add_((1 - beta2) * param.grad)


# Name: the config's section, and the same rule by torch.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[list[Any]], torch.optim.Optimizer]]] = {
    "AdamW": (
        {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1}},
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1),
    ),
    "AdamL2": (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    ),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.05, "weight_decay": 0.1}},
        lambda params: torch.optim.SGD(params, lr=0.05, weight_decay=0.1),
    ),
    "Nesterov": (
        {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
        lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "Adagrad": (
        {"type": "Adagrad", "params": {"lr": 0.05, "weight_decay": 0.01}},
        lambda params: torch.optim.Adagrad(params, lr=0.05, weight_decay=0.01),
    ),
    "Lion": (
        {"type": "Lion", "params": {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        lambda params: Lion(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    ),
}


def plain_run(
    rule: str,
    dtype: torch.dtype,
    steps: int,
    gas: int,
    clipping: float,
    given: Callable[[int, int, torch.dtype], Gradients] = gradients,
) -> dict[str, torch.Tensor]:
    """Weights in double after `steps` steps of plain torch on the same gradients.

    A master starts as the fp32 weight that the user gave; only what is not trained takes the model's dtype.
    """
    model = Zoo()
    for param in model.parameters():
        param.data = param.data.double() if param.requires_grad else param.data.to(dtype).double()
    optimizer = OPTIMIZERS[rule][1]([param for param in model.parameters() if param.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(gas):
            for name, grad in given(step, micro, dtype).items():
                param = getattr(model, name.removesuffix("+"))
                grad = grad.double() / gas
                param.grad = grad if param.grad is None else param.grad + grad
        if clipping:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clipping)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def config(
    optimizer: dict[str, Any] | None,
    *,
    stage: int = 2,
    offload: bool = False,
    dtype: str = "fp32",
    gas: int = 1,
    clipping: float = 0.0,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration dict."""
    zero: dict[str, Any] = {"stage": stage, **sections.pop("zero", {})}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clipping,
        "zero_optimization": zero,
        **PRECISION[dtype],
        **sections,
    }
    if optimizer is not None:
        result["optimizer"] = optimizer
    return result


def cells() -> list[tuple[int, bool]]:
    """Stages and homes of one rank; optimizer states of stage 0 can't leave the device."""
    return [(stage, offload) for stage in (0, 1, 2, 3) for offload in (False, True) if not (stage == 0 and offload)]
