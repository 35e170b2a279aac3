"""What a backward takes, and whose error came out of it."""

from __future__ import annotations

from typing import Any

import torch

from pannier.errors import UsageError


def require_loss(loss: Any) -> None:
    """Raises for what is not a scalar with a graph."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(f"loss must be a scalar tensor, not {_described(loss)}")
    if loss.grad_fn is None and not loss.requires_grad:
        raise UsageError("loss has no graph: nothing that it was computed from requires a gradient")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def comes_from_core(error: Exception) -> bool:
    """Whether an error that came out of a backward was thrown in C++."""
    # The user's own functions run in a backward too; their errors pass as they are. What torch's engine hands over from
    # C++ has torch's caller as its innermost frame.
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and "torch/autograd" in traceback.tb_frame.f_code.co_filename
