"""The model of the checkpoints in tests/python/cases/deepspeed, for those who write them and for those who read them."""

from __future__ import annotations

from typing import Any

import torch

SEEN = torch.arange(3.0)  # The buffer's values in the checkpoints; a fresh model has zeros.


class Net(torch.nn.Module):
    """Tied, frozen and one-dimensional parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.up = torch.nn.Linear(6, 9)
        self.frozen = torch.nn.Linear(9, 6)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(self.frozen(self.up(x).relu()))).float().logsumexp(-1).mean()


def groups_of(model: Net, **matrices: Any) -> list[dict[str, Any]]:
    """Matrices, with settings of their own, and vectors."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], **matrices},
        {"params": [param for param in trained if param.dim() <= 1]},
    ]
