"""What the cases share: a model whose gradient is its input, and its configuration."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import pannier


class Dot(nn.Module):
    """d loss / d w is exactly x, so a test picks the gradient."""

    def __init__(self, w: Sequence[float] = (0.0,)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


class Pair(nn.Module):
    """Two parameters, a and b."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = Dot((a,)), Dot((b,))


class Tied(nn.Module):
    """Two weights that are one, and two look-alikes of equal values."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(8.0).view(4, 2) / 8
        self.emb = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.emb.weight = nn.Parameter(values.clone())
        self.head.weight = self.emb.weight
        self.twin_a = nn.Parameter(values.clone())
        self.twin_b = nn.Parameter(values.clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens)).pow(2).mean()


class Turned(nn.Module):
    """A parameter whose rows do not follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).view(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


# A folder for states on a disk: one for a test run, its ranks included, which find it in their environment.
DISK = "PANNIER_CASES_DISK"
if DISK not in os.environ:
    os.environ[DISK] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ[DISK], ignore_errors=True)

# With eps 1 the first step is w -= g / (|g| + 1): it shows the size of g, where the usual eps shows only its sign.
OPT1 = {"type": "AdamW", "params": {"lr": 1.0, "eps": 1.0, "betas": [0.9, 0.999], "weight_decay": 0.0}}


def offload(dev: str) -> dict[str, Any]:
    """A section `offload_optimizer`; on a disk two chunks of one block in the widest format travel at a time."""
    staging = {"nvme_path": os.environ[DISK], "buffer_count": 1, "buffer_size": 2 * 4096 * 14} if dev == "nvme" else {}
    return {"device": dev, **staging}


def cfg(stage: int = 2, dev: str = "cpu", micro: int = 1, gas: int = 1, opt: Any = OPT1, **kw: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, **kw.pop("zero", {})}
    if dev != "none":
        zero["offload_optimizer"] = offload(dev)
    result = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": opt,
        "zero_optimization": zero,
        **kw,
    }
    return {key: value for key, value in result.items() if value is not None}


def start(model: nn.Module, config: dict[str, Any], **kw: Any) -> pannier.Engine:
    return pannier.initialize(model=model, config=config, **kw)[0]


def run(engine: pannier.Engine, inputs: Sequence[Any]) -> None:
    for x in inputs:
        engine.backward(engine(torch.tensor(x)))
        engine.step()


def weight(engine: pannier.Engine, name: str = "w") -> list[float]:
    """A parameter's fp32 master as a list."""
    param = dict(engine.module.named_parameters())[name]
    master = pannier.safe_get_full_fp32_param(param)
    return (param.detach().float() if master is None else master).tolist()


def matrix() -> Iterator[tuple[int, str]]:
    """Stages and homes that one rank can run; states of stage 0 stay on the device."""
    for stage in (0, 1, 2, 3):
        for dev in ("none", "cpu", "nvme"):
            if stage > 0 or dev == "none":
                yield stage, dev
