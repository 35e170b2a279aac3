"""A small model, its batches, and what plain torch makes of them: what other cuts of the batch must come to."""

from __future__ import annotations

import torch
from torch import nn

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
STEPS, BATCH = 10, 8


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, 17, generator=draw), torch.randn(BATCH, 17, generator=draw)) for _ in range(STEPS)]


def plain() -> list[torch.Tensor]:
    """The weights after training on whole batches."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether every bit is the same."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
