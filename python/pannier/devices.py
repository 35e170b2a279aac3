"""Where a model is trained: on the GPU that it is on or that there is, else on the CPU."""

from __future__ import annotations

import os

import torch

from pannier.errors import ConfigError


def place(model: torch.nn.Module, wanted: str) -> None:
    """Moves a model that is wholly on the CPU to this rank's GPU, as `wanted` ("auto", "cpu" or "cuda") says."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('pannier.device is "cuda", but torch sees no GPU')
    if on_cpu and wanted != "cpu" and torch.cuda.is_available():
        model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
