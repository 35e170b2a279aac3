"""Where a model is trained: on the GPU that it is on or that there is, else on the CPU."""

from __future__ import annotations

import os

import torch

from pannier.errors import ConfigError


def choose(model: torch.nn.Module, wanted: str) -> str:
    """The device that the engine is to take a model to that is wholly on the CPU, as `wanted` ("auto", "cpu" or "cuda")
    says: this rank's GPU. "" leaves the model where it is.

    The engine takes tensors there one bucket at a time, so that the GPU never holds more than was planned. A model with
    tensors of another class than torch's own (quantized ones), which only know how to go there themselves, goes at once.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('pannier.device is "cuda", but torch sees no GPU')
    if any(tensor.device.type != "cpu" for tensor in tensors) or wanted == "cpu" or not torch.cuda.is_available():
        return ""
    torch.cuda.init()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for tensor in tensors):
        model.to(device)
        return ""
    return device
